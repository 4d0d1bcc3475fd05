"""An attention plugin as its contract suite sees it: how it is built, and which rows of the table it says it serves.

The rows are in `attention`, the engine around it in `attention_engine`, the checks in `attention_suite`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from framework.interfaces import AttentionCaps
from framework.testing.attention import CASES, DEEPSEEK, LATENT_CASES, AttentionCase, LatentSizes

_ANY_HEAD_DIM = 16


@dataclass(frozen=True)
class AttentionPlugin:
    """The plugin is built as target(options, AttentionContext). backend: makes the one it runs on, for a dtype."""

    target: Any
    backend: Any
    options: Any = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.target.__name__)

    @property
    def caps(self) -> AttentionCaps:
        caps: AttentionCaps = self.target.caps
        return caps

    @property
    def dtype(self) -> torch.dtype:
        """The first that it serves, float32 if it can."""
        return torch.float32 if "float32" in self.caps.dtypes else getattr(torch, self.caps.dtypes[0])

    def shapes(self) -> list[AttentionCase]:
        """Rows of the table that it says it can serve."""
        return [case for case in map(self.fitted, LATENT_CASES if self.caps.latent else CASES) if self.serves(case)]

    def fitted(self, case: AttentionCase) -> AttentionCase:
        """The case with a layer of a kind and size that it serves: heads of 16 stand for any."""
        sizes = self.caps.head_dims
        if self.caps.latent:
            latent = case.latent or LatentSizes()
            is_other = sizes and latent.rank + latent.rope not in sizes
            return replace(case, latent=DEEPSEEK if is_other else latent)
        is_other = sizes and case.head_dim == _ANY_HEAD_DIM and case.head_dim not in sizes
        return replace(case, head_dim=sizes[0]) if is_other else case

    def serves(self, case: AttentionCase) -> bool:
        caps = self.caps
        is_offered = (
            (case.window is None or caps.window)
            and (case.softcap is None or caps.softcap)
            and (not case.has_sinks or caps.sinks)
            and (case.latent is not None) == caps.latent
        )
        return is_offered and (not caps.head_dims or case.kept[1] in caps.head_dims)
