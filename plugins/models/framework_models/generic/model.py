"""A causal language model of transformers as a `Model`: its code computes everything but attention, which is ours.

Built from config.json and a `WeightSource` like any model here. Before it serves, it is tried out, with a few tokens
and before that without weights with as many as a request may have: layers are read off (`layers`), and a model that
mixes tokens anywhere but in its attention function is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from framework.interfaces import Capabilities, ForwardContext, ModelContext, ModelOutput
from framework_models.generic.attention import PAGED, TRIED, Recorder, Step, register
from framework_models.generic.building import build, class_of, layers_of
from framework_models.generic.features import Features, layers_around
from framework_models.generic.layers import place_layers, refused
from framework_models.generic.rotary import check_rotary, keep_frequencies
from framework_models.generic.weights import load_weights

_NUM_TRIED = 5  # tokens of a model with weights; without them, as many as a request may have cost nothing
_TOLERANCE = {torch.float32: 1e-4}
"""Of the largest hidden state: rows of a product differ by rounding with their place, other tokens make far more."""
_TOLERANCE_HALF = 0.05


class TransformersModel:
    """Any causal language model of transformers whose attention goes through its attention interface."""

    ignored_weights: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)
    caps: ClassVar[Capabilities] = Capabilities(keeps=frozenset())
    label: ClassVar[str] = (
        "the generic path: code of transformers around our attention, no captured steps, slower than a model plugin"
    )

    def __init__(self, config: Mapping[str, Any], ctx: ModelContext) -> None:
        register()
        is_outline = ctx.device.type == "meta"  # shapes alone are asked for: there is no value to look at
        self._name, made = class_of(config)
        self._causal = build(made, config, ctx, is_outline=is_outline)
        self._base = layers_of(self._name, self._causal)
        check_rotary(self._name, self._causal, ctx.max_model_len)
        if not is_outline:
            load_weights(self._causal, ctx)
        self._causal.requires_grad_(False)
        keep_frequencies(self._causal)
        self.ignored_weights = (*self.ignored_weights, *(self._causal._keys_to_ignore_on_load_unexpected or ()))
        self._step, self._head = Step(), _head_of(self._causal)
        self.vocab_size = int(self._causal.get_input_embeddings().weight.shape[0])
        self._try_out(ctx, is_outline=is_outline)

    def embed(self, input_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden_size]."""
        embedded: Tensor = self._causal.get_input_embeddings()(input_ids)
        return embedded

    def forward(self, x: Tensor, positions: Tensor, ctx: ForwardContext) -> ModelOutput:
        """x [T, hidden_size], positions [T]: all tokens of the step side by side, as one row of transformers' batch."""
        self._step.ctx = ctx
        try:
            if not ctx.feature_layers:
                return ModelOutput(self._hidden(x, positions))
            with self._features().kept(ctx.feature_layers) as found:
                hidden = self._hidden(x, positions)
            return ModelOutput(hidden, tuple(found[index] for index in ctx.feature_layers))
        finally:
            self._step.ctx = None

    def _features(self) -> Features:
        if self._layers is None:
            raise refused(self._name, "has no list of layers, whose hidden states are asked for")
        return Features(self._layers)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[L, hidden_size] -> [L, vocab_size]: what the model does behind its last hidden state."""
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    def _hidden(self, x: Tensor, positions: Tensor) -> Tensor:
        out = self._base(inputs_embeds=x[None], position_ids=positions[None], use_cache=False, return_dict=True)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def _try_out(self, ctx: ModelContext, *, is_outline: bool) -> None:
        """Declares the layers, and refuses a model that would not compute the same in a batch of ours."""
        recorder = Recorder()
        recorder.record(self._causal)
        num_tried = ctx.max_model_len if is_outline else _NUM_TRIED
        ids = (torch.arange(num_tried, device=ctx.device) * 7 + 3) % self.vocab_size
        positions = torch.arange(num_tried, device=ctx.device) % ctx.max_model_len
        self._causal.set_attn_implementation(TRIED)
        logits = self._causal(
            input_ids=ids[None],
            position_ids=positions[None],
            attention_mask=torch.ones_like(ids[None]),  # of no padding: without it positions are looked at
            use_cache=False,
        ).logits[0]
        calls, recorder.calls = recorder.calls, []
        self._causal.set_attn_implementation(PAGED)
        num_layers = self._causal.config.num_hidden_layers
        if len(calls) != num_layers:
            raise refused(self._name, f"calls an attention function {len(calls)} times in {num_layers} layers")
        if not is_outline:
            self._check_parts(logits, self.compute_logits(self._hidden(self.embed(ids), positions)))
            self._check_tokens_stand_alone(ids, positions.flip(0))
        self._layers = layers_around(self._base, [call.module for call in calls])
        place_layers(calls, ctx, self._step, self._name)

    def _check_parts(self, whole: Tensor, parts: Tensor) -> None:
        """The model is run as embedding, layers and head, one behind the other."""
        if whole.shape[-1] != self.vocab_size:
            raise refused(self._name, f"has {self.vocab_size} embeddings and {whole.shape[-1]} logits")
        if not _is_near(parts, whole):
            raise refused(self._name, "computes something else when its embedding, layers and head are run in turn")

    def _check_tokens_stand_alone(self, ids: Tensor, positions: Tensor) -> None:
        """With attention that reads nothing but the token itself, the others must not matter, nor the order."""
        order = torch.tensor([2, 0, 3, 1, 4], device=ids.device)
        others = ids[order].clone()
        others[-1] = (others[-1] + 1) % self.vocab_size
        hidden = self._hidden(self.embed(ids), positions)
        moved = self._hidden(self.embed(others), positions[order])
        if not _is_near(moved[:-1], hidden[order][:-1]):
            raise refused(self._name, "mixes tokens, or counts positions, outside of its attention function")


def _is_near(found: Tensor, wanted: Tensor) -> bool:
    tolerance = _TOLERANCE.get(wanted.dtype, _TOLERANCE_HALF)
    return bool((found - wanted).abs().max() <= tolerance * wanted.abs().max())


def _head_of(causal: Any) -> Any:
    """The model with its layers left out: from the last hidden state on it does what the model does."""
    head = copy.copy(causal)
    head._modules = {**causal._modules, causal.base_model_prefix: _Given()}
    return head


class _Given(nn.Module):
    """In the place of a model's layers: what is given comes out, and nothing beside it."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _GivenOutput:
        return _GivenOutput(inputs_embeds)

    @property
    def decoder(self) -> _Given:  # what some models call their layers
        return self


class _GivenOutput:
    """As an output of transformers; fields beside the hidden state are None."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: int) -> Tensor:
        return (self.last_hidden_state,)[place]
