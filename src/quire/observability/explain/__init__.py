"""Explanations: where the time of a request went, and why a server is slow.

For one request: `story.py` cuts its time into episodes, `assemble.py` turns them into the parts
(`parts.py`) of an `Explanation`, and `wording.py` puts causes into sentences. For a server:
`record_signals.py` computes figures from the records, `diagnosis.py` draws conclusions, and
`metric_alerts.py` does both from metrics alone.
"""
