"""Structured output: requests whose text must follow a grammar. The grammars themselves are plugins."""
