"""Cores and how a front end holds one: in a process of its own, or in this one."""
