"""What an engine runs before its first request: the largest step, to learn its memory, and padded steps and steps with
prompts, once each, to compile and record them.

Called by the build. A bar on stderr shows how it gets on.
"""

from __future__ import annotations

import sys
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from framework.interfaces import CompilesAhead, ForwardContext, TakesWorkspace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from framework.engine.choice import Choice
    from framework.engine.loaded import Loaded
    from framework.interfaces import AttentionBackend, LatentUp, LayerSpec
    from framework.worker.model_runner import ModelRunner


class NoAttention:
    """`interfaces.AttentionPlan` or `LatentPlan` of memory that is not there yet: gives queries back, or zeros, and
    takes as much for the while as the layer's attention says."""

    def __init__(self, attention: AttentionBackend, layer: LayerSpec) -> None:
        self._attention, self._layer = attention, layer

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._beside_workspace(q, q.contiguous())

    def forward_latent(self, layer: int, q: Tensor, latent: Tensor, up: LatentUp) -> Tensor:
        return self._beside_workspace(q, q.new_zeros(*q.shape[:2], up.values.shape[1]))

    def _beside_workspace(self, q: Tensor, out: Tensor) -> Tensor:
        if isinstance(self._attention, TakesWorkspace):
            num_bytes = self._attention.workspace_bytes(self._layer, q, out)
            torch.empty(num_bytes, dtype=torch.uint8, device=q.device)
        return out


def profile(choice: Choice, loaded: Loaded, attention: Mapping[str, AttentionBackend]) -> None:
    """Lets the backend run the largest step: as many tokens as there may be, and logits of every row. attention: of
    each KV group.

    What it compiles for that, it compiles together: alone each would wait for the one before it.
    """
    model, device, num_tokens = loaded.model, choice.backend.device, choice.max_num_batched_tokens
    num_rows = min(num_tokens, choice.config.scheduler.max_num_seqs)
    owners = {index: attention[group.name] for group in choice.groups for index in group.layers}
    plans = [NoAttention(owners[layer.index], layer) for layer in loaded.layers]

    def forward() -> None:
        ids = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        hidden = model.forward(model.embed(ids), ids.long(), ForwardContext(plans)).hidden
        model.compute_logits(hidden[:num_rows])

    backend = choice.backend
    with torch.inference_mode():
        if isinstance(backend, CompilesAhead):
            backend.compile_ahead([forward])
        backend.profile(forward)


def warm_up(runner: ModelRunner) -> dict[str, float]:
    """{"capture": seconds} of running steps with prompts and of making the padded steps; nothing for a backend that has
    none of these, which compiles nothing."""
    if not runner.num_padded:
        return {}
    from tqdm import tqdm

    start, prompts = perf_counter(), list(runner.prompt_steps())
    runner.compile_ahead()
    total, is_shown = len(prompts) + runner.num_padded, sys.stderr.isatty()
    with tqdm(total=total, desc="capturing", unit="step", disable=not is_shown, leave=False) as bar:
        for _ in runner.warm_up():
            bar.update()
        for scheduled in prompts:
            with runner.unheard():
                runner.execute(scheduled).result()
            bar.update()
    return {"capture": perf_counter() - start}
