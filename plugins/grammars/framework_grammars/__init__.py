"""Grammars of structured output: each plugin around one library, which is imported when the first request needs it."""
