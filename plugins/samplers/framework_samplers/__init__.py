"""Sampler stages: thresholds, and the draws that end a pipeline."""
