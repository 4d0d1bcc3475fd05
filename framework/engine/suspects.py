"""Which stage makes a row draw another token, where a recording holds tokens alone: two pipelines on equal logits.

The recorded pipeline and that of now are built once more, each for one row; the row's known tokens, its parameters and
its seed are those of then and of now. `run=replay` asks for the first row that differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from framework.engine.choice import choose
from framework.engine.differences import Unlike, first_unlike
from framework.engine.recording import RecordedRequest
from framework.errors import FrameworkError
from framework.interfaces import KVGroup
from framework.rng import MASK64, child_seed
from framework.sampling.trail import SEED, watched_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from framework.batch import Rows
    from framework.config import Config, SamplerConfig
    from framework.engine.choice import Choice
    from framework.engine.engine import Engine
    from framework.engine.replaying import Suspect
    from framework.sampling.trail import Trail

_ROW = 1


def find_stage(engine: Engine, sampler: SamplerConfig, suspect: Suspect, token: int | None) -> Unlike | str:
    """The first stage that does something else with the row's logits, or why there is none to be named.

    sampler  the recorded one, beside that of the engine
    token    the recorded one
    """
    then, now, logits, mask = suspect.recorded, suspect.request, suspect.logits, suspect.mask
    named = then.params.seed
    if named is not None and child_seed(named & MASK64, then.sample_index) != then.seed:
        return Unlike(SEED, f"the trace has {then.seed} for the request, and its parameters have {named}")
    try:
        recorded = _Row(engine, replace(engine.config, sampler=sampler), then, logits, mask)
    except FrameworkError as error:
        return f"the recorded pipeline cannot be built here: {error}"
    present = _Row(engine, engine.config, now, logits, mask)
    if unlike := first_unlike(recorded.trail(), present.trail()):
        return unlike
    forbids = None if token is None else present.pipeline.forbids(present.logits, present.rows, token)
    if forbids is not None:
        return Unlike(forbids, f"it forbids token {token}, with the options that it had then")
    return (
        "both pipelines draw the same here, so what differs is no value of the configuration: the code of a stage, "
        "weights, backend, threads or rounding. Record with engine.trace_stages=true, and the stage is named"
    )


class _Row:
    """A pipeline of its own with one request in it."""

    def __init__(
        self, engine: Engine, config: Config, request: RecordedRequest, logits: Any, mask: NDArray[np.int32] | None
    ) -> None:
        from framework.sampling.watched import WatchedPipeline

        scheduler = replace(config.scheduler, max_num_seqs=1)
        choice = choose(replace(config, scheduler=scheduler, trace=None), engine.plugins, engine.loaded)
        self.pipeline = WatchedPipeline(choice.pipeline)
        _admit(choice, self.pipeline, request)
        device = choice.backend.device
        self.logits, self.rows = logits.to(device).unsqueeze(0), _rows(device, request, mask)

    def trail(self) -> Trail:
        result = self.pipeline.sample(self.logits.clone(), self.rows)
        watched = watched_rows(self.pipeline.collect_payloads(result))
        assert watched is not None and len(watched.trails) == 1, watched
        return watched.trails[0]


def _admit(choice: Choice, pipeline: Any, request: RecordedRequest) -> None:
    from framework.batch import NewRequest

    choice.table.allocate([KVGroup("full", block_size=choice.block_size)])
    new = NewRequest(
        req_idx=_ROW,
        request_id=request.request_id,
        token_ids=np.array(request.token_ids, np.int32),
        num_prompt_tokens=len(request.prompt_token_ids),
        num_computed_tokens=len(request.token_ids) - 1,
        params=request.params,
        seed=request.seed,
    )
    choice.table.add(new)
    pipeline.add_request(_ROW, request.params, new)
    choice.table.apply()
    pipeline.rows_applied()


def _rows(device: Any, request: RecordedRequest, mask: NDArray[np.int32] | None) -> Rows:
    import torch

    from framework.batch import AllowedTokens, Rows

    def column(values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    seed = int(np.array(request.seed, np.uint64).astype(np.int64))
    allowed = None if mask is None else AllowedTokens(None, torch.tensor(mask, device=device).unsqueeze(0))
    return Rows(
        req_idx=column([_ROW], torch.int64),
        offset=column([0], torch.int32),
        position=column([len(request.token_ids)], torch.int64),
        seed=column([seed], torch.int64),
        drafts=torch.zeros((1, 0), dtype=torch.int64, device=device),
        num_drafts=column([0], torch.int32),
        req_idx_np=np.array([_ROW], np.int32),
        allowed=allowed,
    )
