"""What if: the real scheduler on a clock that is not real. No torch."""
