"""The front end: what happens to a request before it reaches a core, and to what comes back."""
