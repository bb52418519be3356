"""Metrics: one table names them, one store keeps their values, several sinks publish them.

`table.py` has a row per metric, `store.py` the values. `prometheus.py` and `exposition.py` write
the text that is scraped, `http_metrics.py` adds what the HTTP side counts, `log_line.py` writes the
stat line, `tensorboard.py` event files.
"""
