"""A third party that takes a name of ours."""
