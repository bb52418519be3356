"""Traces: facts about requests and steps become spans, which are sent over OTLP.

`builder.py` follows requests through the steps; `request_spans.py`, `decode_runs.py` and
`step_spans.py` shape what it gathers into `spans.py` records. `tracer.py` builds and sends on
threads; `otel.py` and `otlp_wire.py` do the sending.
"""
