"""The brain: requests, scheduler, KV blocks. Pure Python, no torch, no I/O."""
