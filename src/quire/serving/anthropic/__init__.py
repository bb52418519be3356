"""Anthropic's Messages API: `POST /v1/messages` and what lies below it."""
