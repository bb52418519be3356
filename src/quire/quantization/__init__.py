"""Quantised linear layers: how checkpoints' codes become weights that the kernels multiply with.

`checkpoint.py` is what all formats share; `online.py` makes codes of an unquantised checkpoint.
Knows no family.
"""
