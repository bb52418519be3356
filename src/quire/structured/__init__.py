"""Structured outputs: what a request may ask for, and what llguidance is given for it.

`params` is the request's side, `settle` turns it into one `Grammar`, `compiler` is the only door to
llguidance, and `state` follows one request's output. Importing the package loads none of
llguidance.
"""
