"""The recorder: what the last steps did, kept in a ring and played back."""
