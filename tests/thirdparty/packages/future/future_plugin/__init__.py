"""A third party written for a later version of the contracts."""
