"""A pipeline outside of an engine: stages of a small registry over host columns."""

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pytest
import torch

from framework import SamplingParams
from framework.config import SamplerConfig, StageConfig
from framework.plugins import ComponentSpec
from framework.sampling.pipeline import SamplerPipeline, build_pipeline
from framework.testing.stages import context, make_rows, new_request

OURS = {
    "temperature": "Temperature", "min_p": "MinP", "top_k": "TopK", "top_p": "TopP", "greedy": "Greedy",
    "gumbel": "Gumbel",
}  # fmt: skip
GUMBEL = ("temperature", "min_p", "top_k", "top_p", "gumbel")


class StageRegistry:
    """The part of a registry that a pipeline needs, with our stages and those a test adds."""

    def __init__(self, others):
        self._targets = {name: getattr(import_module(f"framework_samplers.{name}"), cls) for name, cls in OURS.items()}
        self._targets.update(others)

    def load_target(self, kind, name):
        return self._targets[name]

    def spec(self, kind, name):
        return ComponentSpec(kind, name, "tests:Stage")

    def label(self, spec):
        return f"{spec.kind} '{spec.name}' of tests"

    def load_config_class(self, spec):
        return getattr(self._targets[spec.name], "options_class", None)


@dataclass
class Bench:
    """A pipeline with the requests that its rows hold: row i + 1 serves the i-th request."""

    pipeline: SamplerPipeline
    vocab: int
    rows: list[int] = field(default_factory=list)

    def add(self, *requests: SamplingParams) -> "Bench":
        for params in requests:
            self.pipeline.validate(params)
            row = len(self.rows) + 1
            self.pipeline.add_request(row, params, new_request(row, params))
            self.rows.append(row)
        return self

    def sample(self, logits: torch.Tensor, rows: list[int] | None = None, **where: Any) -> Any:
        return self.pipeline.sample(logits.clone(), make_rows(rows or self.rows, **where))

    def ids(self, logits: torch.Tensor, rows: list[int] | None = None, **where: Any) -> list[int]:
        return self.sample(logits, rows, **where).ids.tolist()

    def support(self, row: torch.Tensor, place: int, count: int = 400) -> set[int]:
        """Ids that `count` draws at successive positions give in the row of request `place`, all others beside it."""
        rows = self.rows * count
        positions = [p for p in range(count) for _ in self.rows]
        ids = self.ids(row.expand(len(rows), -1), rows, positions=positions)
        return set(ids[place :: len(self.rows)])


@pytest.fixture
def bench():
    def make(
        *names, vocab=50, num_rows=12, mode="raw_logprobs", name="gumbel", others=None, options=None, keys=None, **words
    ):
        names = names or GUMBEL
        stages = tuple(StageConfig((keys or {}).get(n, n), n, (options or {}).get(n, {})) for n in names)
        config = SamplerConfig(name, stages, mode)
        registry = StageRegistry(others or {})
        pipeline = build_pipeline(config, registry, lambda key, spec: context(spec, vocab, num_rows), **words)
        return Bench(pipeline, vocab)

    return make
