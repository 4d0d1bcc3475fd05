"""Kernels in Triton and the classes that launch them. Nothing here is imported before a backend asks for it."""
