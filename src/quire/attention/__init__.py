"""Attention backends as siblings, what they read, and the KV cache they read it from.

Nothing here knows requests: only rows, blocks and positions.
"""
