"""Explanations: where the time of a request went, and what is wrong with an engine."""
