"""One sampler stage over a small table, driven as a runner drives it: rows, the tokens before them, steps and commits.

No model and no engine. `StageCase` says which stage and which parameters; the checks of `framework.testing.stages` and
the tests of stages drive a `StageBench`, or build a context and rows by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from framework.batch import Field, NewRequest, Rows
from framework.interfaces import StageContext, StageSpec
from framework.request import SamplingParams
from framework.sampling.deployed import Deployed
from framework.sampling.groups import best
from framework.sampling.interval import open_interval
from framework.sampling.lasting import LastingState
from framework.worker.pooled_column import PooledColumn

VOCAB_SIZE = 300  # not a multiple of 128: the last group is short
NUM_ROWS = 9
MAX_LEN = 64
PROMPT = (1, 2, 3)
FIRST_SEED = 1000


@dataclass(frozen=True)
class StageCase:
    """wanting: parameters that use the stage, at least two different ones; plain: parameters that do not.

    Among the plain ones is a greedy request by default: nothing is drawn for it, whatever else it asks for.
    options        the stage's own options
    eos_token_ids  of the context that the stage is built with
    encode         token ids of a text, for a stage that reads strings; None as in a model without a tokenizer
    """

    target: Any
    wanting: tuple[SamplingParams, ...]
    plain: tuple[SamplingParams, ...] = (SamplingParams(), SamplingParams(temperature=0))
    options: Any = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    encode: Callable[[str], list[int]] | None = None

    @property
    def name(self) -> str:
        return str(self.target.spec.name)


class HostColumn:
    """A declared field outside of an engine. On the host its mirror and its tensor share their memory."""

    def __init__(self, declared: Field, num_rows: int, device: torch.device | None = None):
        shape = (num_rows,) if declared.width == 1 else (num_rows, declared.width)
        self.np: NDArray[Any] = np.full(shape, declared.init, declared.dtype)
        shared = self.np.view(np.int64) if declared.dtype == "uint64" else self.np
        self._host = torch.from_numpy(shared)
        self.dev = self._host if device is None else self._host.to(device)

    def send(self, req_idx: int) -> None:
        """Brings the row to the device, as an admission does."""
        if self.dev is not self._host:
            self.dev[req_idx] = self._host[req_idx].to(self.dev.device)


class HostPool(PooledColumn):
    """A pooled field outside of an engine."""

    def __init__(self, declared: Field, num_rows: int, device: torch.device):
        slots = HostColumn(Field(declared.name, "int32"), num_rows, device)
        super().__init__(declared, slots, getattr(torch, declared.dtype), device, 2)
        self._column = slots

    def take(self, req_idx: int) -> NDArray[Any]:
        """On the host a place is there as soon as it is filled in; elsewhere `send` brings it."""
        filled = super().take(req_idx)
        if self.dev.device != torch.get_default_device():
            return filled
        self.apply()
        shared: NDArray[Any] = self.dev[int(self.slot[req_idx])].numpy()
        return shared

    def send(self, req_idx: int) -> None:
        self._column.send(req_idx)
        self.apply()


def context(
    spec: StageSpec,
    vocab_size: int = VOCAB_SIZE,
    num_rows: int = NUM_ROWS,
    *,
    eos_token_ids: tuple[int, ...] = (),
    encode: Callable[[str], list[int]] | None = None,
    device: torch.device | None = None,
) -> StageContext:
    """A StageContext over columns of its own, for stages and pipelines that run outside of an engine."""
    device = device or torch.get_default_device()
    sized = [f.sized(vocab_size) for f in spec.fields]
    columns = {f.name: (HostPool if f.pooled else HostColumn)(f, num_rows, device) for f in sized}
    return StageContext(
        device=device,
        vocab_size=vocab_size,
        num_rows=num_rows,
        max_num_logits=4 * num_rows,
        eos_token_ids=eos_token_ids,
        column=columns.__getitem__,
        token_ids=torch.zeros(num_rows, MAX_LEN, dtype=torch.int32, device=device),
        encode=encode,
    )


def new_request(
    req_idx: int, params: SamplingParams, seed: int = 0, *, outputs: Sequence[int] = (), num_computed_tokens: int = 0
) -> NewRequest:
    """A request of three prompt tokens; with `outputs` it has been preempted and comes back."""
    tokens = np.array([*PROMPT, *outputs], np.int32)
    return NewRequest(req_idx, f"request-{req_idx}", tokens, len(PROMPT), num_computed_tokens, params, seed)


def same_request(one: NewRequest, other: NewRequest) -> bool:
    return all(np.array_equal(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))


def make_rows(
    req_idx: Sequence[int],
    seeds: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    device: torch.device | None = None,
) -> Rows:
    """Logits rows of these table rows without drafts; a row's seed and position follow from its req_idx by default."""
    positions = [3 + i for i in req_idx] if positions is None else positions
    return draft_rows(req_idx, [()] * len(req_idx), seeds, positions, device)


def draft_rows(
    req_idx: Sequence[int],
    drafts: Sequence[Sequence[int]],
    seeds: Sequence[int] | None,
    positions: Sequence[int],
    device: torch.device | None = None,
) -> Rows:
    """Logits rows of requests with draft tokens: one row more than a request has drafts.

    drafts, seeds, positions  one a request; the position is that of its first row
    """
    seeds = [FIRST_SEED + i for i in req_idx] if seeds is None else seeds
    counts = [len(d) for d in drafts]
    places = [(r, offset) for r, count in enumerate(counts) for offset in range(count + 1)]
    width = max(counts, default=0)
    padded = [[*d, *[0] * (width - len(d))] for d in drafts]

    def column(values: list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Rows(
        req_idx=column([req_idx[r] for r, _ in places], torch.int64),
        offset=column([offset for _, offset in places], torch.int32),
        position=column([positions[r] + offset for r, offset in places], torch.int64),
        seed=column([seeds[r] for r, _ in places], torch.int64),
        drafts=torch.tensor(padded, dtype=torch.int64, device=device).view(len(counts), width),
        num_drafts=column(counts, torch.int32),
        req_idx_np=np.array([req_idx[r] for r, _ in places], np.int32),
    )


@dataclass
class Held:
    """What a row holds: its request's number, which says its seed, and its known tokens."""

    number: int
    tokens: list[int]


class StageBench:
    """A stage, its columns and the tokens of each row.

    nonsense  seeds what stands behind the known tokens of a row, which means nothing
    """

    def __init__(self, case: StageCase, *, nonsense: int = 0, device: torch.device | None = None):
        self.case, self.device = case, device or torch.get_default_device()
        self.spec: StageSpec = case.target.spec
        self.ctx = context(self.spec, eos_token_ids=case.eos_token_ids, encode=case.encode, device=self.device)
        self.held: dict[int, Held] = {}
        self._nonsense = torch.Generator().manual_seed(nonsense)
        self.rebuild()
        self._lasting = LastingState([self.deployed])

    def rebuild(self) -> None:
        """Another object of the stage over the same columns."""
        self.stage = self.case.target(self.case.options, self.ctx)
        self.deployed = Deployed(self.spec.name, self.spec, self.stage, self.ctx, 1)

    def add(
        self,
        req_idx: int,
        params: SamplingParams,
        *,
        outputs: Sequence[int] = (),
        number: int | None = None,
        num_computed_tokens: int = 0,
    ) -> None:
        """A request in the row, as the pipeline puts it there. number: says its seed, the row's by default."""
        number = req_idx if number is None else number
        new = new_request(
            req_idx, params, FIRST_SEED + number, outputs=outputs, num_computed_tokens=num_computed_tokens
        )
        new.request_id = f"request-{number}"
        if self.stage.wants(params):
            self.stage.add_request(req_idx, params, new)
        else:
            self.deployed.reset_row(req_idx)
        for declared in self.spec.fields:
            self.ctx.column(declared.name).send(req_idx)
        self._lasting.add(new)
        self._lasting.give_back()
        self.held[req_idx] = Held(number, new.token_ids.tolist())
        self._write(req_idx)

    def leave(self, req_idx: int) -> None:
        """The request of the row is preempted, or has ended."""
        self._lasting.preempt(req_idx)
        self.deployed.release(req_idx)
        del self.held[req_idx]

    def commit(self, rows: Rows, token: int = 5) -> None:
        """Tells the stage that each row took `token`."""
        count = len(rows.req_idx)
        taken = torch.full((count, 1), token, device=self.device)
        self.stage.commit(rows, taken, torch.ones(count, dtype=torch.int32, device=self.device))

    def run(self, logits: Tensor, rows: Rows, narrow: bool = False) -> Tensor:
        """What the stage makes of the rows, one result a row; of an observer a digest of what it tells each row."""
        result = self.call(logits, rows, narrow)
        if self.spec.kind != "observe":
            return result if isinstance(result, Tensor) else torch.stack(result, 1)
        told = self.stage.collect(result)
        return torch.tensor([digest(one) for one in told] if self.spec.tells_requests else [0] * len(logits))

    def call(self, logits: Tensor, rows: Rows, narrow: bool = False) -> Any:
        """Calls the stage's own method, after which `logits` are as before: changed logits, a pair, ids, a payload."""
        logits = logits.clone()
        if self.spec.kind in ("mask", "elementwise"):
            self.stage.apply(logits, rows)
            return logits
        if self.spec.kind == "observe":
            return self.stage.observe(logits, logits, rows, best(logits)[1])
        lo, hi = narrow_interval(logits) if narrow else open_interval(len(logits), logits.device)
        return (self.stage.bounds if self.spec.kind == "threshold" else self.stage.select)(logits, rows, lo, hi)

    def rows_of(self, field: str, req_idx: Tensor) -> Tensor:
        """What a field holds for these rows on the device."""
        column = self.ctx.column(field)
        values: Tensor = column.dev[column.slot[req_idx].long() if isinstance(column, HostPool) else req_idx]
        return values

    def step(self, req_idx: Sequence[int], logits: Tensor, tokens: Sequence[int]) -> Tensor:
        """A step of these rows in this order, each of which takes its token; the results, one a row."""
        held = [self.held[row] for row in req_idx]
        rows = make_rows(
            req_idx, [FIRST_SEED + h.number for h in held], [len(h.tokens) for h in held], device=self.device
        )
        result = self.run(logits.to(self.device), rows)
        taken = torch.tensor(tokens, dtype=torch.int64, device=self.device).unsqueeze(1)
        self.stage.commit(rows, taken, torch.ones(len(held), dtype=torch.int32, device=self.device))
        for row, token in zip(req_idx, tokens, strict=True):
            self._take(row, [token])
        return result

    def draft_step(
        self, req_idx: Sequence[int], drafts: Sequence[Sequence[int]], logits: Tensor, taken: Sequence[Sequence[int]]
    ) -> Tensor:
        """A step that checks draft tokens. logits: a row for each draft and one more, request by request.

        taken  tokens that each request keeps; what stands behind them in `sampled` means nothing
        """
        held = [self.held[row] for row in req_idx]
        for row, h, proposed in zip(req_idx, held, drafts, strict=True):
            start = len(h.tokens)
            self.ctx.token_ids[row, start : start + len(proposed)] = torch.tensor(proposed, dtype=torch.int32)
        rows = draft_rows(
            req_idx, drafts, [FIRST_SEED + h.number for h in held], [len(h.tokens) for h in held], self.device
        )
        result = self.run(logits.to(self.device), rows)
        width = 1 + max(map(len, drafts))
        nonsense = torch.randint(VOCAB_SIZE, (len(held), width), generator=self._nonsense)
        for place, kept in enumerate(taken):
            nonsense[place, : len(kept)] = torch.tensor(kept)
        counts = torch.tensor([len(kept) for kept in taken], dtype=torch.int32, device=self.device)
        self.stage.commit(rows, nonsense.to(self.device), counts)
        for row, kept in zip(req_idx, taken, strict=True):
            self._take(row, kept)
        return result

    def _take(self, req_idx: int, tokens: Sequence[int]) -> None:
        self.held[req_idx].tokens += tokens
        self._write(req_idx)

    def _write(self, req_idx: int) -> None:
        """The known tokens of the row, and nonsense behind them."""
        known = self.held[req_idx].tokens
        line = torch.randint(VOCAB_SIZE, (MAX_LEN,), generator=self._nonsense, dtype=torch.int32)
        line[: len(known)] = torch.tensor(known, dtype=torch.int32)
        self.ctx.token_ids[req_idx] = line.to(self.device)


def filled(case: StageCase) -> tuple[StageBench, list[int], list[int]]:
    """(bench, table rows that want the stage, rows that do not), mixed over rows 1 to 8."""
    bench = StageBench(case)
    wanting, plain = [1, 3, 4, 6, 8], [2, 5, 7]
    for place, row in enumerate(wanting):
        bench.add(row, case.wanting[place % len(case.wanting)])
    others = case.plain or case.wanting  # every request uses the select stage of a greedy pipeline
    for place, row in enumerate(plain):
        bench.add(row, others[place % len(others)])
    return bench, wanting, plain


def beginning(req_idx: Sequence[int]) -> Rows:
    """Rows that draw the first token behind their prompt."""
    return make_rows(req_idx, positions=[len(PROMPT)] * len(req_idx))


def digest(value: Any) -> int:
    """A number that is equal for equal values, bit for bit: of what an observer tells a request."""
    return crc32(_spelt(value))


def _spelt(value: Any) -> bytes:
    if isinstance(value, Tensor):
        value = value.cpu().numpy()
    if isinstance(value, np.ndarray):
        return repr((value.dtype, value.shape)).encode() + value.tobytes()
    if isinstance(value, Mapping):
        return b"{" + b",".join(_spelt(key) + b":" + _spelt(value[key]) for key in value) + b"}"
    if isinstance(value, list | tuple):
        return b"[" + b",".join(map(_spelt, value)) + b"]"
    if is_dataclass(value):
        return _spelt([getattr(value, one.name) for one in fields(value)])
    return repr(value).encode()


def encode_words(text: str) -> list[int]:
    """Ids of a text of words such as `w3 w7`, 0 for any other: a tokenizer for `StageCase.encode`."""
    return [int(word[1:]) if word[1:].isdigit() else 0 for word in text.split()]


def narrow_interval(logits: Tensor) -> tuple[Tensor, Tensor]:
    """An interval that leaves out the best tokens and the worst."""
    values = logits.sort(-1, descending=True).values
    return values[:, 150].clone(), values[:, 5].clone()


def logits_of(count: int) -> Tensor:
    """[count, V] with equal logits, masked tokens and a flat row."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(count, VOCAB_SIZE, generator=generator) * 3
    logits[:, 10] = logits[:, 200] = logits.amax(-1)
    logits[:, 20:40] = float("-inf")
    logits[count - 1] = 0.5
    return logits


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaN included."""
    if a.is_floating_point():
        a, b = a.contiguous().view(torch.int32), b.contiguous().view(torch.int32)
    return torch.equal(a, b)
