"""Engine cores, and how a front end reaches one: `handle.py` is the contract, `supervisor.py` keeps
a core alive, the others are cores in a process of their own or in the caller's.
"""
