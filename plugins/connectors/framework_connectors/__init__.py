"""KV connectors: what moves KV blocks between engines and memories."""
