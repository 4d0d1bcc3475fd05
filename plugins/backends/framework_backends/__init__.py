"""Backends: the devices that an engine runs on."""
