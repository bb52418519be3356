"""Tokens in, tokens out: `POST /inference/v1/generate`."""
