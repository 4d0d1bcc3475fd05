"""A third party whose plugin module cannot be imported."""
