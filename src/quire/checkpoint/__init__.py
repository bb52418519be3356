"""A model's files as files: formats, checksums, local cache, hub. No tensors, no model families.

Everything here is cheap to import and runs without torch, so that the HTTP process and the
command line can look at a model before anything heavy starts.
"""
