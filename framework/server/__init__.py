"""The HTTP server around one engine: OpenAI-compatible routes, metrics, and a page that shows what the engine does."""
