"""OpenAI's Responses API: `/v1/responses` and what lies below it."""
