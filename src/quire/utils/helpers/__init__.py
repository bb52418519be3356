"""Work of clients in processes that may be killed: `pool` asks them, `side` runs in them, and
`words` is what they say. None of it knows what the work is.
"""
