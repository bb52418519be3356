"""Tensor operations whose result for a row depends on that row alone, bit for bit.

Callers use `quire.kernels.dispatch.ops`. Nothing here knows models, requests or weight files.
"""
