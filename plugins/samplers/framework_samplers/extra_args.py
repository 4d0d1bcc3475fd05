"""The refusal that stages without parameters of their own share. Called from their `validate`."""

from __future__ import annotations

from framework.request import SamplingParams


def refuse_extra_args(stage: str, params: SamplingParams) -> None:
    """ValueError when the request passes extra_args to a stage that reads only the fields of SamplingParams."""
    extra = (params.extra_args or {}).get(stage)
    if extra:
        raise ValueError(f"takes no extra_args, got {sorted(extra)}; its parameters are fields of SamplingParams")
