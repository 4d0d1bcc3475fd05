"""The dense Mistral family: Llama with a window on every layer. Source: Mistral 7B (arXiv 2310.06825), section 2."""

from __future__ import annotations

from typing import ClassVar

from framework_models.dense import Family
from framework_models.llama import Llama


class Mistral(Llama):
    """MistralForCausalLM."""

    family: ClassVar[Family] = Family(knows=("sliding_window",), window=4096)
