"""Stage `top_n_sigma`: a floor under the logits, in standard deviations below the best one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from framework.batch import Field, NewRequest, Rows
from framework.interfaces import Capabilities, StageContext, StageSpec
from framework.request import SamplingParams
from framework.sampling.groups import grouped, row_blocks
from framework.sampling.interval import inside
from framework_samplers.own_args import number, own
from framework_samplers.surprise import part_of

OFF = math.inf


class TopNSigma:
    """Keeps a token iff logit >= max - n * sigma, sigma the standard deviation of the logits that are there.

    Parameter of a request: `n` in (0, 1000]. Max and sigma (of the population, so divided by the count) are those of
    the tokens inside the incoming interval that are not masked; alone in a pipeline they are those of the vocabulary.
    A temperature before it scales all three alike. Source: arXiv 2411.07641, algorithm 1.
    """

    spec: ClassVar[StageSpec] = StageSpec(
        "top_n_sigma",
        kind="threshold",
        fields=(Field("n", "float32", init=OFF),),
        caps=Capabilities(
            keeps=frozenset({"argmax", "kept_set", "async", "drafts", "graph_safe", "batch_invariant", "deterministic"})
        ),
        extra_args=("n",),
    )

    def __init__(self, options: Mapping[str, Any], ctx: StageContext):
        self._n = ctx.column("n")

    def wants(self, params: SamplingParams) -> bool:
        return "n" in own(params, "top_n_sigma")

    def validate(self, params: SamplingParams) -> None:
        number("extra_args.top_n_sigma.n", own(params, "top_n_sigma").get("n", 1.0), 0.0, 1000.0, "(]")

    def add_request(self, req_idx: int, params: SamplingParams, request: NewRequest) -> None:
        self._n.np[req_idx] = own(params, "top_n_sigma").get("n", OFF)

    def bounds(self, logits: Tensor, rows: Rows, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        parts = [_spread(inside(logits[part], part_of(lo, part), part_of(hi, part))) for part in row_blocks(logits)]
        top, sigma = (torch.cat(column) for column in zip(*parts, strict=True))
        n = self._n.dev[rows.req_idx]
        return torch.where(n < OFF, torch.maximum(lo, (top - n * sigma).float()), lo), hi

    def commit(self, rows: Rows, sampled: Tensor, num_valid: Tensor) -> None:
        """Nothing changes with the tokens."""


def _spread(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(largest [L], standard deviation [L] float64) of what is not -inf in float32 logits [L, V].

    The squares are taken about the mean, in float64 where the sums of groups meet: logits may lie far from 0.
    """
    top = logits.amax(-1)
    present = grouped((logits > -torch.inf).float(), 0.0)
    count = present.sum(-1).sum(-1, dtype=torch.float64)
    below = grouped(torch.where(logits > -torch.inf, logits - top.unsqueeze(1), 0.0), 0.0)
    mean = below.sum(-1).sum(-1, dtype=torch.float64) / count
    squares = (below - mean.float().view(-1, 1, 1)).square_().mul_(present)
    return top, (squares.sum(-1).sum(-1, dtype=torch.float64) / count).sqrt()
