"""Measuring an engine in this process: no server, no HTTP. Each benchmark is a module."""
