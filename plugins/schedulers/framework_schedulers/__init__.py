"""Scheduling policies; the default scheduler itself is in the core."""
