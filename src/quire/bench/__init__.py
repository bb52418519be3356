"""Measuring: load on servers of any make, results in one schema, comparison, reports. No torch."""
