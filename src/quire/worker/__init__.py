"""One rank: device, memory, persistent batch state, and the step from a batch to tokens.

Only executors start workers. A worker hears and answers in the words of `core.batch`; it knows
no scheduler, no text and no HTTP.
"""
