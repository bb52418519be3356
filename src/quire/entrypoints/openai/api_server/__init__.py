"""`python -m quire.entrypoints.openai.api_server` is `quire serve`."""
