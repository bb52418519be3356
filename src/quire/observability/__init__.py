"""Facts in, sinks out: the stat line and Prometheus read the same numbers.

Nothing here knows the engine, the scheduler or HTTP.
"""
