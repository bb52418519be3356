"""What the engine did, for people and machines. Facts come in, sinks take them out.

The core reports each step as one record of numbers and decisions (`quire.core.stats`,
`quire.core.facts`). `sinks.py` hands it to everything that listens, so the stat line, Prometheus,
traces and explanations all read the same numbers. Four rooms:

- `metrics`: the table of metrics, their values, and the outputs Prometheus, TensorBoard and log;
- `traces`: OpenTelemetry spans of requests and steps;
- `recorder`: the records of the last steps in memory, and their replay;
- `explain`: causes for the time of a request, and for a slow server.

Nothing here knows the engine, the scheduler's rules or HTTP.
"""
