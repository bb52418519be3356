"""The engine's speed on this machine, beside its peers' on the same work: `quire bench engine`."""
