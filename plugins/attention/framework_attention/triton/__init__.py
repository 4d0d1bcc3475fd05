"""Paged attention in Triton, for CUDA devices: the kernels, one idea a file, and the plugin that launches them.

`plugin` of the package above names `attention:TritonAttention`; nothing else is imported from outside.
"""
