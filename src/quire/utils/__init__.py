"""Leaf helpers. They know nothing of engines, requests or tensors."""
