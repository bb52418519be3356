"""The front end: what happens to a request before it reaches a core, and to what comes back.

`front_end.py` puts the parts together; `listeners.py` says who hears what, and in which order.
"""
