"""What a user asks for and what comes back: parameters, the request itself, outputs. Pure data, no torch.

Parameters check themselves at construction, as far as that needs neither model nor tokenizer; the rest is checked at
admission by the engine and the stages. The scheduler owns `Request`; nobody else changes one.
"""

from __future__ import annotations

import enum
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, InitVar, dataclass, field, fields
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Self

from framework.errors import did_you_mean, shown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from framework.batch import LogprobsColumns
    from framework.structured.constraint import Constraint

SEED_MIN, SEED_MAX = -(2**63), 2**64
FLOAT_MAX = sys.float_info.max
MAX_N = 128
GREEDY_TEMPERATURE = 1e-5
"""Below this temperature a row is greedy: argmax, no draw."""


class _Itself:
    """A default of None in the class, and in an object the object: what `dataclasses.replace` reads and passes on."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return instance


@dataclass(frozen=True, kw_only=True)
class _NamesItsFields:
    """Refuses unknown keywords with the nearest known one, and remembers which fields the caller named.

    `dataclasses.replace` calls the constructor with every field, and with the object it has them from as `_source`:
    what stands there already was not named by this call.
    """

    _source: InitVar[Any] = _Itself()

    named: ClassVar[frozenset[str]]  # of each object, though no field: it is neither compared nor shown

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        source = kwargs.get("_source")
        if isinstance(source, cls):
            del kwargs["_source"]
            kwargs = {name: value for name, value in kwargs.items() if value is not getattr(source, name, MISSING)}
        known = [f.name for f in fields(cls)]
        for word in kwargs:
            if word not in known:
                hint = did_you_mean(word, known) or f" Known: {', '.join(known)}"
                raise TypeError(f"{cls.__name__} has no parameter {shown(word)}.{hint}")
        self = object.__new__(cls)
        named = frozenset(kwargs) | (source.named if isinstance(source, cls) else frozenset())
        object.__setattr__(self, "named", named)
        return self

    def replace(self, **changes: Any) -> Self:
        """A checked copy with `changes`; what the caller had named stays named, and so do the changes.

        `dataclasses.replace` differs in one point: it cannot tell a change to the value that stands there already.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        copy = type(self)(**{**values, **changes})
        object.__setattr__(copy, "named", self.named | frozenset(changes))
        return copy


def plain(value: Any) -> Any:
    """A numpy array or scalar, or a torch tensor, as lists and numbers of Python; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def as_integer(label: str, value: Any) -> int:
    """`value` as an int, whoever's integer it is. TypeError that begins with `label` for bools and non-integers."""
    value = plain(value)
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise TypeError(f"{label} must be an integer, got {shown(value)}")
    return operator.index(value)


def _number(owner: str, name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    """`value` as a float inside the range; refuses bools, non-numbers and NaN by name."""
    value = plain(value)
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number:
        raise TypeError(f"{owner}.{name} must be a number, got {shown(value)}")
    inside = (low < value if open_low else low <= value) and value <= high
    if not inside:  # NaN is inside of nothing
        left = "(" if open_low else "["
        limit = f"finite and at least {low:g}" if high == FLOAT_MAX else f"in {left}{low:g}, {high:g}]"
        raise ValueError(f"{owner}.{name} must be {limit}, got {shown(value)}")
    return float(value)


def _integer(owner: str, name: str, value: Any, low: int, high: int | None = None) -> int:
    value = as_integer(f"{owner}.{name}", value)
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"in {low}..{high}"
        raise ValueError(f"{owner}.{name} must be {limit}, got {shown(value)}")
    return value


def _flag(owner: str, name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{owner}.{name} must be True or False, got {shown(value)}")
    return value


def _name(owner: str, name: str, key: Any) -> str:
    """A key of a mapping from names."""
    if not isinstance(key, str) or not key.isprintable():
        raise TypeError(f"{owner}.{name} must map names to values, got {shown(key)} for a name")
    return key


def _token_ids(owner: str, name: str, value: Any, *, if_empty: str | None = None) -> tuple[int, ...]:
    """Ids in a tuple; `if_empty` is the way out of an empty list where that is refused."""
    value = plain(value)
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f"{owner}.{name} must be a list of token ids, got {shown(value)}")
    ids = tuple(_integer(owner, f"{name}[{place}]", i, 0) for place, i in enumerate(value))
    if not ids and if_empty is not None:
        raise ValueError(f"{owner}.{name} must not be empty; {if_empty}")
    return ids


def _words_of_ids(owner: str, name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    value = plain(value)
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TypeError(f"{owner}.{name} must be a list of lists of token ids, got {shown(value)}")
    way_out = "leave that word out"
    return tuple(_token_ids(owner, f"{name}[{place}]", w, if_empty=way_out) for place, w in enumerate(value))


def _strings(owner: str, name: str, value: Any) -> tuple[str, ...]:
    """Tuple of non-empty strings from one string or a list of them."""
    value = plain(value)
    items = (value,) if isinstance(value, str) else value
    if isinstance(items, Mapping) or not isinstance(items, Iterable):
        raise TypeError(f"{owner}.{name} must be a string or a list of strings, got {shown(value)}")
    out = tuple(items)
    for item in out:
        if not isinstance(item, str):
            raise TypeError(f"{owner}.{name} must hold strings only, got {shown(item)}")
        if not item:
            raise ValueError(f"{owner}.{name} must not hold an empty string")
    return out


class OutputKind(enum.Enum):
    """Which RequestOutputs a step returns: the finished one only, all text so far, or what is new."""

    FINAL = "final"
    CUMULATIVE = "cumulative"
    DELTA = "delta"


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams(_NamesItsFields):
    """Exactly one constraint on the generated text.

    json            a JSON Schema, as a dict or as JSON
    json_object     True: any JSON object
    regex           an expression that the whole text matches
    choice          texts, one of which it is
    grammar         EBNF whose rule `root` derives it
    structural_tag  free text with tags in it, whose content is constrained, as a dict or as JSON
    Raises ValueError or TypeError, naming the field. What a grammar cannot serve is refused at admission.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None

    def __post_init__(self, _source: Any) -> None:
        given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        if len(given) != 1:
            names = ", ".join(f.name for f in fields(self))
            raise ValueError(f"exactly one of {names} is needed; got {given or 'none'}")
        self._check(given[0], getattr(self, given[0]))

    def _check(self, name: str, value: Any) -> None:
        own = type(self).__name__
        if name == "choice":
            object.__setattr__(self, name, _strings(own, name, value))
            if not self.choice:
                raise ValueError(f"{own}.choice must not be empty; give at least one text")
        elif name == "json_object":
            if not _flag(own, name, value):
                raise ValueError(f"{own}.json_object must be True; leave structured_outputs out for any text")
        elif not isinstance(value, str | Mapping if name in ("json", "structural_tag") else str):
            wanted = "a dict or JSON" if name in ("json", "structural_tag") else "a string"
            raise TypeError(f"{own}.{name} must be {wanted}, got {shown(value)}")
        elif not value and isinstance(value, str):
            raise ValueError(f"{own}.{name} must not be empty; leave structured_outputs out for any text")


@dataclass(frozen=True, kw_only=True)
class PoolingParams(_NamesItsFields):
    """What a pooling request asks for; the part that serves it is not built yet, so admission refuses it by name."""

    task: str = "embed"
    normalize: bool = True
    dimensions: int | None = None


@dataclass(frozen=True, kw_only=True)
class SamplingParams(_NamesItsFields):
    """How one request is sampled and when it ends.

    n                           completions of the prompt, 1..128
    temperature                 divides the logits; finite, 0 or more; below 1e-5 the row is greedy
    top_k                       keeps the k most likely tokens, and ties; 1 is greedy; -1, 0, above the vocabulary: off
    top_p                       keeps the most likely tokens up to this mass; (0, 1]
    min_p                       drops tokens less likely than this share of the most likely one; [0, 1]
    repetition_penalty          of tokens of prompt and output: positive logits divided by it, others times it; (0, 10]
    frequency_penalty           taken off a logit for each time that its token stands in the output; [-2, 2]
    presence_penalty            taken off a logit once its token stands in the output; [-2, 2]
    seed                        of the draws, [-2^63, 2^64), modulo 2^64; None: one is drawn at admission
    max_tokens                  tokens to generate at most, 1 or more; None: up to `engine.max_model_len`
    min_tokens                  until there are so many, eos, stop ids and stop strings end nothing; at most max_tokens
    stop                        string or strings that end the text; the earliest wins, then the longest
    stop_token_ids              ids that end it
    ignore_eos                  goes on after the eos ids of the checkpoint; stop_token_ids end it nevertheless
    include_stop_str_in_output  leaves the stop string in the text
    logprobs                    of each token: the k best and its own; 0: its own, -1: of the whole vocabulary
    prompt_logprobs             the same for the tokens of the prompt, of which the first has none
    logprob_token_ids           ids whose logprobs are given at each generated token beside what logprobs asks for
    logit_bias                  {token id: number in [-100, 100]}, added to the logits
    allowed_token_ids           ids that may be drawn, at least one; None: all
    bad_words                   string or strings that are not generated
    bad_words_token_ids         the same as lists of ids
    structured_outputs          a StructuredOutputsParams, or a dict of its fields
    detokenize                  False: no text, and neither stop nor bad_words
    skip_special_tokens         leaves special tokens out of the text
    output_kind                 final, cumulative or delta: what is given while the request runs, see OutputKind
    stages                      {stage: bool}: switches stages of the deployed sampler for this request
    extra_args                  {stage: {name: value}}: parameters of stages that have no field here
    Raises ValueError or TypeError at construction, naming field, value and range; an unknown name is a TypeError
    with the nearest known one. `named` holds the fields the caller wrote: only those can make a pipeline refuse.
    A changed copy, by `.replace()` or `dataclasses.replace`, adds its changes to `named`.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Any = None
    stop_token_ids: Any = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Any = None
    logit_bias: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    bad_words_token_ids: Any = None
    structured_outputs: Any = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    output_kind: Any = OutputKind.FINAL
    stages: Any = None
    extra_args: Any = None

    OWNER: ClassVar[str] = "SamplingParams"

    def __post_init__(self, _source: Any) -> None:
        self._check_numbers()
        self._check_lists()
        self._check_mappings()
        self._check_together()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        own = self.OWNER
        self._set("n", _integer(own, "n", self.n, 1, MAX_N))
        self._set("temperature", _number(own, "temperature", self.temperature, 0.0, FLOAT_MAX))
        self._set("top_k", _integer(own, "top_k", self.top_k, -1))
        self._set("top_p", _number(own, "top_p", self.top_p, 0.0, 1.0, open_low=True))
        self._set("min_p", _number(own, "min_p", self.min_p, 0.0, 1.0))
        self._set(
            "repetition_penalty", _number(own, "repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        )
        for name in ("frequency_penalty", "presence_penalty"):
            self._set(name, _number(own, name, getattr(self, name), -2.0, 2.0))
        if self.seed is not None:
            self._set("seed", _integer(own, "seed", self.seed, SEED_MIN, SEED_MAX - 1))
        if self.max_tokens is not None:
            self._set("max_tokens", _integer(own, "max_tokens", self.max_tokens, 1))
        self._set("min_tokens", _integer(own, "min_tokens", self.min_tokens, 0))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._set(name, _integer(own, name, getattr(self, name), -1))
        for name in ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens"):
            _flag(own, name, getattr(self, name))

    def _check_lists(self) -> None:
        own = self.OWNER
        for name in ("stop", "bad_words"):
            if getattr(self, name) is not None:
                self._set(name, _strings(own, name, getattr(self, name)))
        if self.stop_token_ids is not None:
            self._set("stop_token_ids", _token_ids(own, "stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            way_out = "leave it out to allow every token"
            ids = _token_ids(own, "allowed_token_ids", self.allowed_token_ids, if_empty=way_out)
            self._set("allowed_token_ids", ids)
        if self.logprob_token_ids is not None:
            self._set("logprob_token_ids", _token_ids(own, "logprob_token_ids", self.logprob_token_ids))
        if self.bad_words_token_ids is not None:
            self._set("bad_words_token_ids", _words_of_ids(own, "bad_words_token_ids", self.bad_words_token_ids))

    def _check_mappings(self) -> None:
        own = self.OWNER
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise TypeError(f"{own}.logit_bias must map token ids to numbers, got {shown(self.logit_bias)}")
            bias = self.logit_bias.items()
            checked = {
                _integer(own, "logit_bias key", k, 0): _number(own, f"logit_bias[{shown(k)}]", v, -100, 100)
                for k, v in bias
            }
            self._set("logit_bias", checked)
        if self.stages is not None:
            if not isinstance(self.stages, Mapping):
                raise TypeError(f"{own}.stages must map stage names to True or False, got {shown(self.stages)}")
            self._set(
                "stages", {_name(own, "stages", k): _flag(own, f"stages[{k}]", v) for k, v in self.stages.items()}
            )
        if self.extra_args is not None:
            if not isinstance(self.extra_args, Mapping) or not all(
                isinstance(v, Mapping) for v in self.extra_args.values()
            ):
                raise TypeError(
                    f"{own}.extra_args must map stage names to dicts of parameters, got {shown(self.extra_args)}"
                )
            self._set("extra_args", {_name(own, "extra_args", k): dict(v) for k, v in self.extra_args.items()})
        if isinstance(self.structured_outputs, Mapping):
            given = {_name(own, "structured_outputs", k): v for k, v in self.structured_outputs.items()}
            try:
                self._set("structured_outputs", StructuredOutputsParams(**given))
            except (TypeError, ValueError) as error:
                raise type(error)(f"{own}.structured_outputs: {error}") from None
        elif not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            what = shown(self.structured_outputs)
            raise TypeError(f"{own}.structured_outputs must be a dict or StructuredOutputsParams, got {what}")
        if not isinstance(self.output_kind, OutputKind):
            kinds = {kind.value: kind for kind in OutputKind}
            if not isinstance(self.output_kind, str) or self.output_kind not in kinds:
                raise ValueError(f"{own}.output_kind must be one of {', '.join(kinds)}, got {shown(self.output_kind)}")
            self._set("output_kind", kinds[self.output_kind])

    def _check_together(self) -> None:
        own = self.OWNER
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            least, most = shown(self.min_tokens), self.max_tokens
            raise ValueError(f"{own}.min_tokens ({least}) must not exceed max_tokens ({most})")
        if not self.detokenize and (self.stop or self.bad_words):
            field_name = "stop" if self.stop else "bad_words"
            strings = shown(list(getattr(self, field_name)))
            raise ValueError(
                f"{own}.{field_name}={strings} needs text, but detokenize=False; use {field_name}_token_ids, "
                "or leave detokenize out"
            )

    def __hash__(self) -> int:
        """Of what can be hashed: fields that are mappings tell equal parameters apart from others, not their hashes."""
        values = [getattr(self, f.name) for f in fields(self)]
        return hash(tuple(v for v in values if not isinstance(v, Mapping | StructuredOutputsParams)))

    @property
    def asks_logprobs(self) -> bool:
        """Whether generated tokens come with logprobs: of the best, of the token itself, or of listed ids."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def is_greedy(self) -> bool:
        """Whether the row is decided by argmax: temperature below 1e-5, or top_k equal to 1."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """{field: class default}."""
        return {f.name: f.default for f in fields(cls) if f.default is not MISSING}

    def unlike_defaults(self) -> dict[str, Any]:
        """{field: value} of those that are not the class default."""
        plain = type(self)()
        values = {name: getattr(self, name) for name in self.defaults()}
        return {name: value for name, value in values.items() if value != getattr(plain, name)}


class RequestStatus(enum.IntEnum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3
    LOADING = 4  # holds blocks that a KV connector fills, and no row


@dataclass(slots=True, eq=False)
class Request:
    """One request from admission to its end. Owned and changed by the scheduler alone.

    While steps go on with the same requests, token_ids, num_computed_tokens, num_in_flight, block_ids and
    num_published_blocks may be some steps behind.
    They are up to date wherever somebody is called who may look: a policy, a connector, an observer; in the tokens that
    `Scheduler.update` returns, once one is read; and after `Scheduler.stats`.

    token_ids            every committed token: prompt, then outputs
    num_computed_tokens  tokens whose KV exists or is being computed by a step in flight
    num_in_flight        sampled tokens that steps in flight will return (async scheduling)
    req_idx              row of the request table while it runs, else -1
    first_scheduled_time  moment of its first admission to a step, `time.perf_counter` seconds
    block_ids            physical blocks, one list a KV group; in groups with a window the null block where one has been
                         given up, and no more columns than steps have been made for
    block_hashes         chained keys of its full blocks, computed once
    arrival_index        place in the order of arrival, all different: siblings follow the first one by fractions
    num_cached_tokens    prompt tokens taken from the prefix cache at first admission
    lease                number of its stay in the block pool, unique in the engine: a KV connector reports by it
    max_total_tokens     prompt plus outputs at which it ends with `length`
    parent_id            id that the caller knows it by: its own, but for siblings of a request with n > 1
    sample_index         which of the n completions it is
    siblings             all requests that are drawn from its prompt, itself too; empty when it is the only one
    eos_token_ids        ids that end it with `stop` (empty under ignore_eos)
    constraint           its place in its grammar, None without structured output
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_total_tokens: int
    arrival_time: float = 0.0
    arrival_index: float = 0
    priority: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    cache_salt: str | None = None
    lora: str | None = None
    mm_features: Any = None
    prompt: str | None = None
    parent_id: str = ""
    sample_index: int = 0
    siblings: Sequence[Request] = ()
    constraint: Constraint | None = None

    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    status: RequestStatus = RequestStatus.WAITING
    req_idx: int = -1
    lease: int = -1
    block_ids: list[list[int]] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_cached_tokens: int = -1
    num_preemptions: int = 0
    num_published_blocks: int = 0
    first_scheduled_time: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)
        self.parent_id = self.parent_id or self.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and committed outputs."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]


@dataclass(slots=True)
class NewTokens:
    """What one step gave one request: `Scheduler.update` returns these, the output side turns them into text.

    logprobs_row     row of `StepOutput.logprobs` of the first token, -1 without logprobs
    prompt_logprobs  columns of the prompt's tokens from the second on, with the first token of a request that asks
    payloads         {stage: an entry a token} of observe stages that the request wants
    ends_in_text     finish_reason `stop`, and the last token is of the text nevertheless: nothing may follow it
    """

    request: Request
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs_row: int = -1
    error: str | None = None
    prompt_logprobs: LogprobsColumns | None = None
    payloads: Mapping[str, list[Any]] = field(default_factory=dict)
    ends_in_text: bool = False


class OneEach(Sequence[NewTokens]):
    """What a step gave `requests` where each of them got one token and goes on: `NewTokens` for whoever reads them.

    requests      in batch-row order. Steps that go on share the list: the same object stands for the same requests
    sampled       [R, 1] int32
    has_logprobs  whether the step has logprobs, of each row that asked
    settle        brings the requests up to date, which whoever reads the tokens may look at
    """

    __slots__ = ("_news", "_settle", "has_logprobs", "requests", "sampled")

    def __init__(
        self, requests: list[Request], sampled: NDArray[np.int32], has_logprobs: bool, settle: Callable[[], None]
    ) -> None:
        self.requests, self.sampled, self.has_logprobs = requests, sampled, has_logprobs
        self._settle = settle
        self._news: list[NewTokens] | None = None

    def __len__(self) -> int:
        return len(self.requests)

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __iter__(self) -> Iterator[NewTokens]:
        return iter(self._all())

    def _all(self) -> list[NewTokens]:
        if self._news is None:
            self._settle()
            self._news = [self.of_row(row) for row in range(len(self.requests))]
        return self._news

    def of_row(self, row: int) -> NewTokens:
        """What a batch row got; the request itself may still be behind."""
        request, has_logprobs = self.requests[row], self.has_logprobs
        at = row if has_logprobs and request.params.asks_logprobs else -1
        return NewTokens(request, [int(self.sampled[row, 0])], logprobs_row=at)


@dataclass(frozen=True, slots=True)
class Logprob:
    """logprob: natural log, or a logit, by `sampler.logprobs_mode`, and -inf of a masked token; rank: 1 + number of
    strictly larger ones."""

    logprob: float
    rank: int | None
    decoded_token: str | None = None


class TokenLogprobs(Sequence[Any]):
    """A list of `{token_id: Logprob}`, one entry a token, backed by arrays; entries are built when they are read.

    Of a prompt the first entry is None: nothing predicts its first token.
    Of each token there are its id, the columns of its step, and its row of them: three lists, since an object a token
    would be one more for the garbage collector to look at.
    """

    def __init__(self, decode: Any = None) -> None:
        self._token_ids: list[int] = []
        self._columns: list[LogprobsColumns | None] = []  # None where nothing is told
        self._rows: list[int] = []
        self._k = 0  # best tokens of an entry
        self._decode = decode
        self.cumulative = 0.0

    @classmethod
    def of_prompt(cls, token_ids: Sequence[int], columns: LogprobsColumns | None, k: int, decode: Any) -> TokenLogprobs:
        """One entry for each of the prompt's tokens; columns [len(token_ids) - 1], None for a prompt of one token.

        k  how many of the best tokens are asked for, -1 for the whole vocabulary
        """
        made = cls(decode)
        made._token_ids, made._columns, made._rows = [token_ids[0]], [None], [-1]
        made.extend(token_ids[1:], columns, 0, k)
        return made

    def extend(self, token_ids: Sequence[int], columns: LogprobsColumns | None, first_row: int, k: int) -> None:
        """Appends an entry for each token: row `first_row` of the columns is that of the first one."""
        if not token_ids:
            return
        assert columns is not None, "logprobs were asked for and the step has none"
        rows = range(first_row, first_row + len(token_ids))
        self.extend_by_steps(
            token_ids, [columns] * len(rows), rows, k, columns.sampled[rows.start : rows.stop].tolist()
        )

    def extend_by_steps(
        self,
        token_ids: Sequence[int],
        columns: Sequence[LogprobsColumns],
        rows: Sequence[int],
        k: int,
        logprobs: Sequence[float],
    ) -> None:
        """Appends an entry for each token, with the columns of its step, its row of them, and its own logprob."""
        assert len(columns) == len(token_ids), "logprobs were asked for and a step has none"
        self._k = k
        self._token_ids += token_ids
        self._columns += columns
        self._rows += rows
        for logprob in logprobs:
            self.cumulative += logprob

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._entry(place) for place in range(*index.indices(len(self)))]
        return self._entry(index)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        """The first entries, and few of their tokens: with -1 an entry holds the whole vocabulary."""
        more = ", ..." if len(self) > 2 else ""
        return f"TokenLogprobs({len(self)} entries: [{', '.join(map(self._shown, range(len(self))[:2]))}{more}])"

    def _shown(self, place: int) -> str:
        columns = self._columns[place]
        is_long = columns is not None and len(columns.beside(self._rows[place], self._k)[0]) > 3
        return f"{repr(self._entry(place, 3))[:-1]}, ...}}" if is_long else repr(self._entry(place))

    def view(self, start: int = 0) -> TokenLogprobs:
        """Entries from `start` on, sharing the arrays: what a delta output holds."""
        part = TokenLogprobs(self._decode)
        part._token_ids, part._columns, part._rows = self._token_ids[start:], self._columns[start:], self._rows[start:]
        part._k, part.cumulative = self._k, self.cumulative
        return part

    def _entry(self, place: int, most: int | None = None) -> dict[int, Logprob] | None:
        """The token itself, then the best and those that the request lists, in which tokens may come twice."""
        token_id, columns, row = self._token_ids[place], self._columns[place], self._rows[place]
        if columns is None:
            return None
        text = self._decode or (lambda _: None)
        entry = {token_id: Logprob(float(columns.sampled[row]), int(columns.rank[row]), text(token_id))}
        beside = [numbers[:most].tolist() for numbers in columns.beside(row, self._k)]
        for i, value, rank in zip(*beside, strict=True):
            if i != token_id:
                entry[i] = Logprob(value, rank, text(i))
        return entry


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, seconds; arrival_time is since the epoch, the others are durations.

    queue_time: arrival to first scheduling. ttft: arrival to first token. tpot: mean time of the tokens after the
    first, None below two outputs. itl: each gap between tokens. e2e: arrival to end.
    With n > 1: ttft is that of the first token of any completion and e2e ends with the last; itl holds the gaps within
    each completion, in the order in which their tokens came, and tpot is the mean of the completions' own.
    """

    arrival_time: float
    queue_time: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    itl: list[float] = field(default_factory=list)
    e2e: float | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion. token_ids holds every generated token, the ending one too; text leaves eos and stop ids out.

    payloads: {stage: an entry a token} of observe stages that the request wants, None where one said nothing.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    payloads: dict[str, list[Any]] = field(default_factory=dict)


@dataclass(slots=True)
class RequestOutput:
    """What a request has given so far, or all of it when `finished`. `prompt` is None for token-id prompts."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: TokenLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
    error: str | None = None
