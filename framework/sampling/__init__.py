"""The sampler: an ordered pipeline of stages, the keyed draw that ends it, and logprobs of what it chose."""
