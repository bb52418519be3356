"""The HTTP server: routes, requests and replies. Knows the engine only through `engine_protocol`;
no torch."""
