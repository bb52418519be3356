"""One rank of a model: device, memory, batch state kept between steps, and the way from a batch to
tokens.

Only executors start workers. A worker takes and returns the records of `core.batch`; it knows no
scheduler, no text and no HTTP.
"""
