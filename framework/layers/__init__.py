"""The parts that models are assembled from: one class an idea, plain objects with a cheap call.

Nothing here knows a model family or a device; products, attention and elementwise operations come from the backend.
"""
