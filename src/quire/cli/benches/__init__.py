"""The commands of `quire bench`, one module each: flags in, text and JSON out. What they measure is
in `quire.bench`."""
