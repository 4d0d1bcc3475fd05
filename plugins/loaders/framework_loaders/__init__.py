"""Readers of weights and model configurations."""
