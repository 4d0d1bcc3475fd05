"""A third party that adds a sampler stage and a scheduling policy."""
