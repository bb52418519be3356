"""Building blocks that model families share.

They are built from a `LayerContext` and form a tree of `Module`s. They know weights and operations,
no family.
"""
