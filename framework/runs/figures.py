"""What a run measured, as its caller and the table of a sweep take it: names, numbers, units. Runs make it."""

from __future__ import annotations

from collections.abc import Mapping


def number(value: float) -> str:
    """Four figures, and all of those before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


class Figures(dict[str, float]):
    """{name: number}. units: of those that have one in no word of their name."""

    def __init__(self, figures: Mapping[str, float], units: Mapping[str, str] | None = None) -> None:
        super().__init__(figures)
        self.units = {name: unit for name, unit in (units or {}).items() if name in self}
