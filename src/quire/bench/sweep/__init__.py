"""Many runs over a grid of parameters, and what to see in them: `quire bench sweep`."""
