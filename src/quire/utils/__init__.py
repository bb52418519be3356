"""Small helpers at the bottom of the stack. They know nothing of engines, requests or tensors."""
