"""Faults against any OpenAI-compatible server, from outside: what `quire chaos URL` does.

Needs nothing but the server's address: no process id, no torch, nothing of quire's engine. The
drills of `tests/chaos` use the same clients against servers that they also hurt from within.
"""
