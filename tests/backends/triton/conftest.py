"""Pipelines twice over the same requests: stage by stage in torch, and with the Triton kernels, over a real table.

Where no CUDA device is visible the kernels run in Triton's interpreter, and the same tests run on a device with
`-m cuda`.
"""

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pytest
import torch

from ...interpreted import HAS_TRITON, kernel_device, quiet_interpreter  # noqa: F401  (fixtures; before triton)

from framework import SamplingParams, step_ops  # isort: skip
from framework.batch import NewRequest, Rows  # isort: skip
from framework.config import SamplerConfig, StageConfig  # isort: skip
from framework.interfaces import StageContext  # isort: skip
from framework.plugins import ComponentSpec  # isort: skip
from framework.rng import gumbel, random_bits, row_key  # isort: skip
from framework.sampling.pipeline import build_pipeline  # isort: skip
from framework.worker.request_table import RequestTable  # isort: skip

if HAS_TRITON:
    from framework_backends.triton.sampler_ops import TritonSamplerOps
else:
    collect_ignore_glob = ["test_*.py"]
    TritonSamplerOps = object

OURS = {
    "grammar": "GrammarMask",
    "allowed_ids": "AllowedIds", "min_tokens": "MinTokens", "logit_bias": "LogitBias", "penalties": "Penalties",
    "temperature": "Temperature", "min_p": "MinP", "top_k": "TopK", "top_p": "TopP", "gumbel": "Gumbel",
    "greedy": "Greedy",
}  # fmt: skip
GUMBEL = tuple(name for name in OURS if name != "greedy")
ROUNDING = 2e-5
"""Scores of the draw are float32 sums of size 10 or so; exp, log and the order of sums differ between devices."""


class _Stages:
    """The part of a registry that a pipeline needs."""

    def __init__(self, others):
        self._others = others

    def load_target(self, kind, name):
        if name in self._others:
            return self._others[name]
        return getattr(import_module(f"framework_samplers.{name}"), OURS[name])

    def spec(self, kind, name):
        return ComponentSpec(kind, name, "tests:Stage")

    def label(self, spec):
        return f"'{spec.name}' of tests"

    def load_config_class(self, spec):
        return None


class Counting(TritonSamplerOps):
    """Counts its draws: a test that compares torch with torch shows nothing."""

    def __init__(self, **words):
        super().__init__(**words)
        self.num_draws = 0

    def sample(self, *args):
        self.num_draws += 1
        return super().sample(*args)


@dataclass
class Side:
    """A pipeline over a request table of its own."""

    pipeline: Any
    table: RequestTable

    def add(self, req_idx, params, tokens, num_prompt, seed):
        new = NewRequest(req_idx, f"request-{req_idx}", tokens, num_prompt, 0, params, seed)
        self.table.add(new)
        self.pipeline.add_request(req_idx, params, new)

    def sample(self, logits, rows):
        self.table.apply()
        return self.pipeline.sample(logits.clone(), rows)


@dataclass
class Pair:
    """The same requests on both sides: row i + 1 serves the i-th."""

    plain: Side
    fused: Side
    device: torch.device
    vocab: int
    ops: Counting
    rows: list[int] = field(default_factory=list)

    def add(self, *requests: SamplingParams, outputs=()) -> "Pair":
        for params in requests:
            row = len(self.rows) + 1
            tokens = torch.tensor([1, 2, 3, *outputs], dtype=torch.int32).numpy()
            for side in (self.plain, self.fused):
                side.pipeline.validate(params)
                side.add(row, params, tokens, 3, seed=1000 + row)
            self.rows.append(row)
        return self

    def logits_rows(self, rows=None, position=5, allowed=None) -> Rows:
        rows = self.rows if rows is None else rows
        on = {"device": self.device}
        return Rows(
            req_idx=torch.tensor(rows, **on),
            offset=torch.zeros(len(rows), dtype=torch.int32, **on),
            position=torch.tensor([position + i for i in rows], **on),
            seed=torch.tensor([1000 + i for i in rows], **on),
            drafts=torch.zeros(len(rows), 0, dtype=torch.int64, **on),
            num_drafts=torch.zeros(len(rows), dtype=torch.int32, **on),
            req_idx_np=torch.tensor(rows, dtype=torch.int32).numpy(),
            allowed=allowed,
        )

    def both(self, logits, **where):
        rows = self.logits_rows(**where)
        logits = logits.to(self.device)
        return self.plain.sample(logits, rows), self.fused.sample(logits, rows)

    def compare(self, logits, **where):
        """Draws once on both sides; ids may differ only where the two best scores are within rounding."""
        plain, fused = self.both(logits, **where)
        assert self.ops.num_draws == 1
        self.ops.num_draws = 0
        assert (fused.told < 0).tolist() == (plain.told < 0).tolist()
        assert ((fused.ids >= 0) & (fused.ids < self.vocab)).all()
        for place in (fused.told != plain.told).nonzero().flatten().tolist():
            close_call(self, logits, place, int(plain.ids[place]), int(fused.ids[place]), **where)
        return plain, fused


def close_call(pair, logits, place, one, other, **where):
    """Fails unless the two ids are as good as equal for this row's draw."""
    rows = pair.logits_rows(**where)
    alone = pair.logits_rows([int(rows.req_idx[place])], **{k: v for k, v in where.items() if k != "rows"})
    kept = processed(pair.plain.pipeline, logits[place : place + 1].to(pair.device), alone)[0].cpu().double()
    seed, position = int(rows.seed[place]), int(rows.position[place])
    groups = torch.nn.functional.pad(kept, (0, -len(kept) % 128), value=-torch.inf).view(-1, 128)
    first, second = one // 128, other // 128
    if first != second:
        ids = torch.arange(len(groups))
        scores = groups.logsumexp(1) + gumbel(random_bits(row_key(seed, position, 0, 0), ids)).double()
        gap = scores[first] - scores[second]
    else:
        ids = torch.arange(len(kept))
        scores = kept + gumbel(random_bits(row_key(seed, position, 0, 1), ids)).double()
        gap = scores[one] - scores[other]
    assert abs(gap) < ROUNDING * max(1.0, float(kept.max().abs())), f"row {place}: {one} and {other} are {gap} apart"


def processed(pipeline, logits, rows):
    """Kept logits of rows behind all stages of the torch side."""
    plan = pipeline._plan(rows)
    work = logits.float().clone()
    pipeline._apply(pipeline._running(pipeline._shared, plan), work, rows)
    if plan.random is None:
        return work
    return pipeline._draw_rows(work, rows, plan, True)[2]


@pytest.fixture
def pair(device):
    def make(*names, vocab=700, others=None, mode="raw_logprobs", **words):
        names = names or GUMBEL
        config = SamplerConfig("gumbel", tuple(StageConfig(n, n, {}) for n in names), mode)
        ops = Counting(**{"block_groups": 4, "row_groups": 2} | words)
        sides = [_side(config, _Stages(others or {}), device, vocab, one) for one in (None, ops)]
        return Pair(*sides, device, vocab, ops)

    return make


def _side(config, registry, device, vocab, ops):
    table = RequestTable(9, 64, device, step_ops)

    def context(key, spec):
        table.declare(key, [one.sized(vocab) for one in spec.fields])
        return StageContext(device, vocab, 9, 9, (7,), lambda name: table.column(key, name), table.token_ids)

    pipeline = build_pipeline(config, registry, context, ops=ops)
    table.allocate(())
    return Side(pipeline, table)
