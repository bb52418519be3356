"""Files of a model as files: formats, digests, local cache, hub. No tensors, no families.

Everything here is cheap to import and runs without torch, so that the HTTP process and the
command line can look at a model before anything heavy starts.
"""
