"""Mixture-of-experts, latent-attention and GLM families, for `test_families.py`."""

from hf_checkpoint import Row

MOE: tuple[Row, ...] = ()
