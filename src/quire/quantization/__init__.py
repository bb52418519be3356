"""Quantised linear layers: how checkpoints' codes become weights that the kernels multiply with.

`method.py` is what all formats share. Knows no family.
"""
