"""Metrics: the table that names them, their values, and the ways they leave."""
