"""Options of acme's components; light, so that they are checked before anything heavy is imported."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class AcmeBiasConfig:
    """token_ids: ids of the target vocabulary; bias: added to their logits, before the temperature."""

    token_ids: list[int] = field(default_factory=list)
    bias: float = 1.0


@dataclass(frozen=True)
class AcmeFatigueConfig:
    """token_ids: ids of the target vocabulary that tire together."""

    token_ids: list[int] = field(default_factory=list)
