"""Traces: facts become spans, spans leave over OTLP."""
