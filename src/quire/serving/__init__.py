"""HTTP: routes, requests and replies. Knows the engine only through `engine_api`; no torch."""
