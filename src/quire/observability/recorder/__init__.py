"""The recorder: what the last steps did, kept in memory and played back on demand.

`ring.py` keeps the records as bytes, `lives.py` folds them into the state of each request, and
`replay.py` goes through a copy step by step. `chrome_trace.py` draws that as a timeline.
"""
