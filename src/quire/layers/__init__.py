"""Building blocks that model families share. They know weights and operations, no family."""
