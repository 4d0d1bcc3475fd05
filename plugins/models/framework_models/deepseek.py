"""What the DeepSeek families V2 and V3 share: latent attention, and mixtures of experts behind some dense layers.

Llama's stack with another attention and another feed-forward block. How a router's scores become experts is a family's
own. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from framework.errors import CheckpointError
from framework.interfaces import ModelContext, Routing
from framework.layers.decoder import AttentionBlock, FeedForward
from framework.layers.latent import LatentAttention, LatentSizes, attention_scale
from framework.layers.moe import SharedExperts, SparseMLP, load_experts
from framework.layers.rope import RopeConfig, Rotary
from framework_models.dense import DenseConfig, Family, read_count, read_dense, read_factor, read_size, read_switch
from framework_models.llama import Llama


@dataclass(frozen=True)
class MixtureConfig:
    """Mixtures of experts: `num_experts` of width `width` in every layer_freq-th layer from first_layer on, 0 in none.

    shared_width  of what every token uses beside them, 0 for nothing
    """

    num_experts: int
    width: int
    shared_width: int
    first_layer: int
    layer_freq: int

    def is_in(self, layer: int) -> bool:
        """Whether this layer is sparse."""
        return self.num_experts > 0 and layer >= self.first_layer and layer % self.layer_freq == 0


class Deepseek(Llama, ABC):
    """A family says by `routing` which of its experts a token gets.

    ignored_weights  layers behind the last one, which predict further tokens: they are no part of the main model
    """

    family: ClassVar[Family] = Family(
        knows=(
            "attention_bias", "kv_lora_rank", "n_routed_experts", "num_nextn_predict_layers", "rope_interleave",
            "routed_scaling_factor",
        )
    )  # fmt: skip

    def __init__(self, config: Mapping[str, Any], ctx: ModelContext) -> None:
        self.latent, self.mixture = read_latent(config), read_mixture(config)
        self.rotates_neighbours = read_switch(config, "rope_interleave", True)
        self._routing = self.routing(config, self.mixture.num_experts) if self.mixture.num_experts else None
        super().__init__(config, ctx)
        first = read_size(config, "num_hidden_layers")
        further = range(first, first + read_count(config, "num_nextn_predict_layers", 0))
        self.ignored_weights = (*type(self).ignored_weights, *(rf"^model\.layers\.{i}\." for i in further))  # type: ignore[misc]

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DenseConfig:
        """As Llama's; of a head, the rotated dimensions alone."""
        heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
        if kv_heads not in (None, heads):
            raise CheckpointError(
                f"config.json: num_key_value_heads={kv_heads} with num_attention_heads={heads}: in latent attention "
                "every head has its own keys. Correct it."
            )
        return read_dense({**config, "head_dim": config.get("qk_rope_head_dim")}, cls.family)

    @abstractmethod
    def routing(self, config: Mapping[str, Any], num_experts: int) -> Routing:
        """Of every mixture, without its bias. Raises CheckpointError for a key that the family does not have."""

    def layer_routing(self, ctx: ModelContext, prefix: str, routing: Routing) -> Routing:
        """Of the mixture `prefix`."""
        return routing

    def attention(
        self, ctx: ModelContext, dense: DenseConfig, index: int, rotary: Rotary | None, **others: Any
    ) -> AttentionBlock:
        assert rotary is not None and not others, (rotary, others)
        return LatentAttention(
            ctx,
            f"model.layers.{index}.self_attn",
            self.latent,
            rotary=rotary,
            scale=_scale(self.latent, dense.rope),
            bias=dense.qkv_bias,
            neighbours=self.rotates_neighbours,
        )

    def feed_forward(self, ctx: ModelContext, dense: DenseConfig, index: int) -> FeedForward:
        mixture, size, prefix = self.mixture, dense.hidden_size, f"model.layers.{index}.mlp"
        if not mixture.is_in(index):
            return super().feed_forward(ctx, dense, index)
        assert self._routing is not None
        routing = self.layer_routing(ctx, prefix, self._routing)
        weights = load_experts(ctx, f"{prefix}.experts", mixture.num_experts, size, mixture.width)
        shared = None
        if mixture.shared_width:
            shared = SharedExperts(ctx, f"{prefix}.shared_experts", size, mixture.shared_width)
        return SparseMLP(ctx, prefix, weights, routing, shared=shared)


def read_latent(config: Mapping[str, Any]) -> LatentSizes:
    """Sizes of the attention. Raises CheckpointError naming the key that is missing or no size."""
    rank = config.get("q_lora_rank")
    return LatentSizes(
        hidden_size=read_size(config, "hidden_size"),
        num_heads=read_size(config, "num_attention_heads"),
        query_rank=None if rank is None else read_size(config, "q_lora_rank"),
        rank=read_size(config, "kv_lora_rank"),
        nope_dim=read_size(config, "qk_nope_head_dim"),
        rope_dim=read_size(config, "qk_rope_head_dim"),
        value_dim=read_size(config, "v_head_dim"),
    )


def _scale(sizes: LatentSizes, rope: RopeConfig) -> float:
    mscale = rope.options.get("mscale_all_dim") or 0.0
    return attention_scale(sizes.key_dim, rope.number("factor"), mscale) if mscale else attention_scale(sizes.key_dim)


def read_mixture(config: Mapping[str, Any]) -> MixtureConfig:
    """Where experts are, and how wide. Raises CheckpointError naming the key that is missing or no size."""
    num_experts = read_count(config, "n_routed_experts", 0)
    width = read_size(config, "moe_intermediate_size") if num_experts else 0
    return MixtureConfig(
        num_experts=num_experts,
        width=width,
        shared_width=width * read_count(config, "n_shared_experts", 0),
        first_layer=read_count(config, "first_k_dense_replace", 0),
        layer_freq=read_size(config, "moe_layer_freq", 1),
    )


def read_word(config: Mapping[str, Any], key: str, served: tuple[str, ...]) -> str:
    """One of `served`, the first where config.json has none. Raises CheckpointError for another word."""
    word = config.get(key)
    word = served[0] if word is None else word
    if word not in served:
        raise CheckpointError(
            f"config.json: {key}={word!r} is not served. Served: {', '.join(served)}. Use a checkpoint of one of these."
        )
    return str(word)


def read_groups(config: Mapping[str, Any], num_experts: int, k: int, least: int) -> tuple[int, int]:
    """(n_group, topk_group): into how many groups experts fall, and how many of those a token may choose from.

    least  experts that a group needs. Raises CheckpointError for groups that do not fit the experts.
    """
    groups, chosen = read_size(config, "n_group", 1), read_size(config, "topk_group", 1)
    size = num_experts // groups
    if num_experts % groups or size < least or chosen > groups or k > chosen * size:
        raise CheckpointError(
            f"config.json: n_group={groups}, topk_group={chosen} and num_experts_per_tok={k} do not fit "
            f"n_routed_experts={num_experts}: groups are of one size, at least {least}, and the chosen ones hold all "
            "that a token gets. Correct it."
        )
    return groups, chosen


def read_scale(config: Mapping[str, Any]) -> float:
    """The factor of all weights, `routed_scaling_factor`. Raises CheckpointError for what is no number above 0."""
    return read_factor(config.get("routed_scaling_factor"), "routed_scaling_factor") or 1.0
