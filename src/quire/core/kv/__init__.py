"""KV blocks: which block holds which tokens. No tensors: only ids."""
