"""vLLM's module tree, for scripts written for vLLM: which names exist, and what is behind them.

`quire run` installs it (`alias.py`); nothing else in quire knows this package.
"""
