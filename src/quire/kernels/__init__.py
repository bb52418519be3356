"""Tensor operations whose result for a row depends on that row alone, bit for bit.

A model computes with the table of one implementation (`quire.kernels.dispatch.Ops`). Nothing here
knows models, requests or weight files.
"""
