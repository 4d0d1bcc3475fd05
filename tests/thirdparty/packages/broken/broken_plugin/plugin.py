"""Raises, as a plugin does whose native library does not fit."""

raise RuntimeError("libbroken is too old: 3 < 4")
