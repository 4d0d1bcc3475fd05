"""A sampler stage in real engines: the same requests alone, together, in chunks, preempted, and with steps in flight.

The model is a crafted one whose logits are a table, so that nothing but the sampler and the scheduler is at work. One
check, apart from `framework.testing.stages.CHECKS` because it takes a second; `run=check` calls it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from framework.config import (
    GUMBEL_STAGES,
    Config,
    EngineOptions,
    KVCacheConfig,
    ModelConfig,
    SamplerConfig,
    SchedulerConfig,
    StageConfig,
)
from framework.engine.build import build_engine
from framework.engine.engine import Engine
from framework.errors import RequestError
from framework.plugins import ComponentSpec, EventBus, registry
from framework.request import SamplingParams
from framework.testing.byte_model import quiet, save_byte_model
from framework.testing.checking import Skipped
from framework.testing.stage_bench import FIRST_SEED, StageCase

NUM_JOBS, NUM_TOKENS = 6, 10
BLOCK_SIZE = 4
PLACE = {"mask": 0, "elementwise": 1, "threshold": -1, "select": -1, "observe": -1}
"""Where a stage goes in the default pipeline when no configuration says it: in front of the stage of this index."""


@dataclass(frozen=True)
class Job:
    """One request: its name, its prompt and its parameters."""

    name: str
    prompt: list[int]
    params: SamplingParams


Outcome = tuple[list[int], str | None, str | None]
"""Tokens, finish reason and error of a request."""


def check_engine_gives_equal_tokens(case: StageCase) -> None:
    """One seed, one request: the same tokens alone, among others, in chunks, preempted, and with steps in flight."""
    jobs = _jobs(case)
    with tempfile.TemporaryDirectory() as folder:
        model = save_byte_model(Path(folder), case.eos_token_ids)
        with _engine(case, model) as engine:
            alone = {job.name: _run(engine, [job])[job.name] for job in jobs}
            for name, (_, reason, error) in alone.items():
                assert reason != "error", f"{case.name}: request {name} ends with an error: {error}"
            _compare(case, alone, _run(engine, jobs), "among others")
            _compare(case, alone, _run(engine, jobs[::-1]), "among others that came in another order")
        with _engine(case, model, max_num_batched_tokens=5) as engine:
            _compare(case, alone, _run(engine, jobs), "in chunks")
        tight = _blocks_of_the_longest(jobs) + 2
        with _engine(case, model, num_blocks=tight) as engine:
            _compare(case, alone, _run(engine, jobs), "preempted")
            count = engine.stats()["num_preemptions"]
            assert count, f"{case.name}: nothing was preempted in a pool of {tight} blocks, so nothing was checked"
        if "async" in case.target.spec.caps.keeps:
            with _engine(case, model, async_scheduling=True) as engine:
                _compare(case, alone, _run(engine, jobs), "with steps in flight")


def _jobs(case: StageCase) -> list[Job]:
    """Requests that want the stage and others, of different lengths, each with a seed of its own."""
    jobs = []
    some = [*case.wanting[:4], *case.plain[:2], *case.wanting[4:]]
    for number, params in enumerate((some * NUM_JOBS)[: max(NUM_JOBS, len(some))]):
        seed = FIRST_SEED + number if params.seed is None else params.seed
        own = params.replace(seed=seed, max_tokens=max(NUM_TOKENS, params.min_tokens))
        jobs.append(Job(f"{number}", [1 + (number * 7 + i * i) % 40 for i in range(3 + number)], own))
    return jobs


def _blocks_of_the_longest(jobs: Sequence[Job]) -> int:
    return max(-(-(len(job.prompt) + (job.params.max_tokens or 0)) // BLOCK_SIZE) for job in jobs)


def _compare(case: StageCase, alone: dict[str, Outcome], found: dict[str, Outcome], how: str) -> None:
    for name, expected in alone.items():
        assert found[name] == expected, f"{case.name}: request {name} gives {found[name]} {how}, and {expected} alone"


def _run(engine: Engine, jobs: Sequence[Job]) -> dict[str, Outcome]:
    for job in jobs:
        try:
            engine.add_request(job.name, job.prompt, job.params)
        except RequestError as error:  # as where a library is missing
            raise Skipped(f"engines refuse its requests here: {error}") from error
    found: dict[str, Outcome] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                (completion,) = output.outputs
                found[output.request_id] = (completion.token_ids, completion.finish_reason, output.error)
    return found


@contextmanager
def _engine(
    case: StageCase,
    model: Path,
    *,
    num_blocks: int = 200,
    max_num_batched_tokens: int = 512,
    async_scheduling: bool = False,
) -> Iterator[Engine]:
    keeps = case.target.spec.caps.keeps
    config = Config(
        model=ModelConfig(path=str(model)),
        engine=EngineOptions(
            dtype="float32",
            max_model_len=64,
            async_scheduling=async_scheduling,
            batch_invariant="batch_invariant" in keeps,
        ),
        kv_cache=KVCacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks, prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=max_num_batched_tokens),
        sampler=SamplerConfig("check", pipeline_with(case)),
    )
    plugins: Any = _WithStage(registry(), case)
    with quiet():
        engine = build_engine(config, plugins)
        try:
            yield engine
        finally:
            engine.close()


def pipeline_with(case: StageCase) -> tuple[StageConfig, ...]:
    """The default pipeline with the stage of the case in it; a select stage takes the place of the default one."""
    own = StageConfig(case.name, case.name, _values(case.options))
    stages = [stage for stage in GUMBEL_STAGES if stage.name != case.name]
    kind = case.target.spec.kind
    if kind == "select":
        stages = [stage for stage in stages if stage.name != "gumbel"]
        return (*stages, own)
    names = [stage.name for stage in GUMBEL_STAGES]
    at = names.index(case.name) if case.name in names else PLACE[kind] % len(stages)
    return (*stages[:at], own, *stages[at:])


def _values(options: Any) -> dict[str, Any]:
    return {f.name: getattr(options, f.name) for f in fields(options)} if is_dataclass(options) else dict(options)


class _WithStage:
    """A registry in which the name of the case's stage leads to the case's own class. Nobody observes its engines:
    observers that are installed beside the stage would take its requests for somebody's."""

    def __init__(self, plugins: Any, case: StageCase) -> None:
        self._plugins, self._case = plugins, case
        self.events = EventBus()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plugins, name)

    def _is_ours(self, kind: str, name: str) -> bool:
        return (kind, name) == ("stage", self._case.name)

    def load_target(self, kind: str, name: str) -> Any:
        return self._case.target if self._is_ours(kind, name) else self._plugins.load_target(kind, name)

    def spec(self, kind: str, name: str) -> ComponentSpec:
        if self._is_ours(kind, name):
            return ComponentSpec(kind, name, "the.case:itself")
        found: ComponentSpec = self._plugins.spec(kind, name)
        return found

    def load_config_class(self, spec: ComponentSpec) -> type | None:
        if self._is_ours(spec.kind, spec.name):
            return type(self._case.options) if is_dataclass(self._case.options) else None
        found: type | None = self._plugins.load_config_class(spec)
        return found
