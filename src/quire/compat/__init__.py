"""vLLM's module tree for scripts written for it: which names there are and what stands behind them.

`quire run` installs it (`alias.py`); nothing else of quire knows this package.
"""
