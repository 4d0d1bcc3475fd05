"""A model family in real engines: the same requests alone, together, in chunks, preempted, and with steps in flight.

Two checks, apart from `framework.testing.models.CHECKS` because they take a second or two; `run=check` calls them.
The backend is the one that an engine chooses here, and attention the best for it that serves the family's layers in
these engines. Where there is none the checks are skipped; whatever else stands in the way of an engine fails them.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from framework.config import ComponentConfig, Config, EngineOptions, KVCacheConfig, ModelConfig, SchedulerConfig
from framework.engine.attending import unfit
from framework.engine.build import build_engine
from framework.engine.engine import Engine
from framework.errors import PluginError
from framework.interfaces import Checkpoint, WeightSource
from framework.plugins import ComponentSpec, EventBus, registry
from framework.request import SamplingParams
from framework.testing.backend_case import backend_here
from framework.testing.byte_model import quiet
from framework.testing.checking import Skipped
from framework.testing.model_bench import MAX_LEN, ModelCase, RandomWeights, outline_of

NUM_TOKENS = 6
LENGTHS = (3, 11, 18, 7)  # of the prompts: below and above a block and a chunk
BLOCK_SIZE = 8
GROWING = (7, 7, 7, 15, 15)
"""Of prompts that all begin another block in each KV group, whatever windows it has: the first three start with one."""
FEW_BLOCKS = 5
"""A group: three of the prompts fit, with a block left for each of two of them."""
MAX_APART = 2e-3
"""Of logprobs: float32 sums in another order, through layers whose random weights make them larger."""
OF_THE_CASE = "case"
"""Name of the family and of its weights in the engines of a check."""

Logprobs = list[dict[int, float]]
"""Of each token that a request was given: the logprob of every token of the vocabulary."""


def check_engine_gives_equal_logprobs(case: ModelCase) -> None:
    """The same alone, among others, in chunks, preempted, from the prefix cache, and with steps in flight."""
    with tempfile.TemporaryDirectory() as folder:
        model, prompts, growing = _saved(case, Path(folder)), _prompts(case, LENGTHS), _prompts(case, GROWING)
        with _engine(case, model) as engine:
            alone = {name: _run(engine, {name: prompt})[name] for name, prompt in {**prompts, **growing}.items()}
            _compare(case, alone, _run(engine, prompts), "among others")
        with _engine(case, model, max_num_batched_tokens=5, prefix_caching=True) as engine:
            _compare(case, alone, _run(engine, prompts), "in chunks")
            _assert_count(case, engine, "prefix_hit_tokens", 0, "come from the prefix cache before anything is in it")
            _compare(case, alone, _run(engine, prompts), "from the prefix cache")
            hits = sum((length - 1) // BLOCK_SIZE * BLOCK_SIZE for length in LENGTHS)
            _assert_count(case, engine, "prefix_hit_tokens", hits, "come from the prefix cache")
        with _engine(case, model, num_blocks=1 + FEW_BLOCKS * len(engine.facts["kv_groups"])) as engine:
            _compare(case, alone, _run(engine, growing), "preempted")
            count = engine.stats()["num_preemptions"]
            assert count, f"{case.name}: nothing was preempted in a pool of {FEW_BLOCKS} blocks a KV group"
        with _engine(case, model, async_scheduling=True) as engine:
            _compare(case, alone, _run(engine, prompts), "with steps in flight")


def _assert_count(case: ModelCase, engine: Engine, name: str, wanted: int, what: str) -> None:
    found = engine.stats()[name]
    assert found == wanted, f"{case.name}: {found} tokens {what}, {wanted} should"


def check_engine_serves_dummy_weights(case: ModelCase) -> None:
    """`engine.load_format=dummy` makes every weight that the family takes, and logits that are peaked and differ."""
    with tempfile.TemporaryDirectory() as folder, _engine(case, _saved(case, Path(folder)), "dummy") as engine:
        given = _run(engine, _prompts(case, LENGTHS))
    uniform = -math.log(len(next(iter(given.values()))[0]))
    for name, logprobs in given.items():
        assert len(logprobs) == NUM_TOKENS, f"{case.name}: request {name} ends after {len(logprobs)} tokens"
        best = max(logprobs[0].values())
        assert uniform + 0.5 < best < -1e-3, (
            f"{case.name}: the best of the dummy logprobs is {best:.3f}, between {uniform:.3f} of equal ones and 0"
        )
    firsts = [logprobs[0] for logprobs in given.values()]
    assert all(_apart(firsts[0], other) > MAX_APART for other in firsts[1:]), f"{case.name}: logits follow no prompt"


def _saved(case: ModelCase, folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(dict(case.config)))
    return folder


def _prompts(case: ModelCase, lengths: Sequence[int]) -> dict[str, list[int]]:
    """By the names of their requests; each begins with another token."""
    size = int(case.config["vocab_size"])
    return {
        f"{length} tokens, number {number} of {len(lengths)},": [
            (length + 5 * number + 3 * i * i + 7 * i) % size for i in range(length)
        ]
        for number, length in enumerate(lengths, 1)
    }


def _run(engine: Engine, prompts: Mapping[str, Sequence[int]]) -> dict[str, Logprobs]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=-1)
    for name, prompt in prompts.items():
        engine.add_request(name, list(prompt), params)
    found: dict[str, Logprobs] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                (completion,) = output.outputs
                assert output.error is None, f"request of {output.request_id} ends with an error: {output.error}"
                rows = completion.logprobs or ()
                found[output.request_id] = [{token: e.logprob for token, e in row.items()} for row in rows]
    return found


def _compare(case: ModelCase, alone: dict[str, Logprobs], found: dict[str, Logprobs], how: str) -> None:
    """Up to the first token that two nearly equal ones may have decided otherwise."""
    for name, logprobs in found.items():
        for place, (mine, others) in enumerate(zip(logprobs, alone[name], strict=True)):
            apart = _apart(mine, others)
            assert apart <= MAX_APART, (
                f"{case.name}: logprobs of token {place} of the request of {name} are {apart:.2g} apart {how} and alone"
            )
            if _best(mine) != _best(others):
                break


def _apart(mine: dict[int, float], others: dict[int, float]) -> float:
    return max(abs(value - others[token]) for token, value in mine.items())


def _best(logprobs: dict[int, float]) -> int:
    return max(logprobs, key=lambda token: (logprobs[token], -token))


@contextmanager
def _engine(
    case: ModelCase,
    folder: Path,
    load_format: str = OF_THE_CASE,
    *,
    num_blocks: int = 100,
    max_num_batched_tokens: int = 512,
    prefix_caching: bool = False,
    async_scheduling: bool = False,
) -> Iterator[Engine]:
    config = Config(
        model=ModelConfig(path=str(folder)),
        engine=EngineOptions(
            dtype="float32",
            max_model_len=MAX_LEN,
            load_format=load_format,
            async_scheduling=async_scheduling,
            graphs="auto" if case.keeps("graph_safe") else "off",
        ),
        kv_cache=KVCacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks, prefix_caching=prefix_caching),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=max_num_batched_tokens),
        attention=ComponentConfig(_attention(case)),
    )
    plugins: Any = _WithModel(registry(), case)
    with quiet():
        engine = build_engine(config, plugins)
        try:
            yield engine
        finally:
            engine.close()


def _attention(case: ModelCase) -> str:
    """The best attention plugin for the family's layers in float32 and in blocks of BLOCK_SIZE. Skipped where none can
    be used here: that is no fault of the family's."""
    plugins = registry()
    of_layers = unfit(plugins, outline_of(case))

    def reason(spec: ComponentSpec) -> str | None:
        caps = plugins.load_target("attention", spec.name).caps
        if "float32" not in caps.dtypes or caps.needs_exact_lens:
            return f"it serves {', '.join(caps.dtypes)}{' and no steps in flight' * caps.needs_exact_lens}"
        if not caps.any_block_size and BLOCK_SIZE not in caps.block_sizes:
            return f"it serves no blocks of {BLOCK_SIZE} tokens"
        return of_layers(spec)

    try:
        return plugins.auto("attention", backend_here(plugins).device.type, reason).name
    except PluginError as error:
        raise Skipped(f"engines of this check cannot be built here: {error}") from error


@dataclass(frozen=True)
class _Loader:
    """`interfaces.Loader` of a folder with a config.json alone, for random weights."""

    case: ModelCase

    def checkpoint(self, location: Path) -> Checkpoint:
        return Checkpoint(location, OF_THE_CASE, self.case.config)

    def open(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device, seed: int) -> WeightSource:
        return _OnDevice(checkpoint.config, device)


class _OnDevice(RandomWeights):
    def __init__(self, config: Mapping[str, Any], device: torch.device) -> None:
        super().__init__(config)
        self._device = device

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        return super().take(name, shape, dtype).to(self._device)


class _WithModel:
    """A registry in which the checkpoint's architecture leads to the family of the case, and which has its weights.
    Nobody observes its engines."""

    def __init__(self, plugins: Any, case: ModelCase) -> None:
        self._plugins = plugins
        self._ours = {("model", OF_THE_CASE): case.target, ("loader", OF_THE_CASE): lambda options, ctx: _Loader(case)}
        self.events = EventBus()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plugins, name)

    def provider(self, kind: str, value: str) -> ComponentSpec:
        if kind == "model":
            return self.spec(kind, OF_THE_CASE)
        found: ComponentSpec = self._plugins.provider(kind, value)
        return found

    def spec(self, kind: str, name: str, key: str | None = None) -> ComponentSpec:
        if (kind, name) in self._ours:
            return ComponentSpec(kind, name, "the.case:itself")
        found: ComponentSpec = self._plugins.spec(kind, name, key)
        return found

    def load_target(self, kind: str, name: str) -> Any:
        return self._ours.get((kind, name)) or self._plugins.load_target(kind, name)


ENGINE_CHECKS = (check_engine_gives_equal_logprobs, check_engine_serves_dummy_weights)
