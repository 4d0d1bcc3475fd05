"""What tests of attention over a library share: a stand-in for a backend, and what the libraries compute, in torch."""

from types import SimpleNamespace

import pytest
import torch


def _backend(device):
    """The part of a backend that an attention plugin and its suite need; on a device, steps are captured."""

    def allocate_kv(specs, num_blocks):
        shapes = [[num_blocks if size == -1 else size for size in spec.shape] for spec in specs]
        return [torch.zeros(shape, dtype=spec.dtype, device=device) for shape, spec in zip(shapes, specs, strict=True)]

    def compile_(step, bucket):
        step()
        if torch.device(device).type == "cpu":
            return step
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        return lambda: (graph.replay(), out)[1]

    return SimpleNamespace(name="tests", device=torch.device(device), allocate_kv=allocate_kv, compile=compile_)


@pytest.fixture
def backend_on():
    """backend_on(device name)"""
    return _backend


def _attend(q, keys, values, pages, length, scale, left, softcap):
    """One request: q [n, Hq, D] are the last of its length tokens, which lie in pages of keys [pages, size, Hk, D].

    left  keys before a query's own that it reads, -1 for all; a page that no query reads is not touched
    softcap  0 or None for none
    """
    size = keys.shape[1]
    first = max(0, length - len(q) - left) // size if left >= 0 else 0
    length -= first * size
    keys, values = (cache[pages[first:].long()].flatten(0, 1)[:length].float() for cache in (keys, values))
    position = torch.arange(length - len(q), length)[:, None]
    place = torch.arange(length)
    hidden = (place > position) | ((place < position - left) if left >= 0 else False)
    queries = q.float().unflatten(1, (keys.shape[1], -1))
    scores = torch.einsum("tkgd,lkd->tkgl", queries, keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("tkgl,lkd->tkgd", weights, values).flatten(1, 2).to(q.dtype)


@pytest.fixture
def attend():
    return _attend
