"""Attention backends, the choice among them, and the memory of the KV cache.

Nothing here knows requests: only rows, blocks and positions.
"""
