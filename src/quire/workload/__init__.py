"""What is asked of an engine: when, how long, and what requests share. No torch, no engine."""
