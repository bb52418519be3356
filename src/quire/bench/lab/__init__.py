"""Small experiments that show what one setting does, measured on this machine: `quire lab`."""
