"""The bar on stderr: requests done, prefill and decode tokens a second. Reads counters and changes nothing."""

from __future__ import annotations

import sys
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from framework.engine.engine import Engine

_INTERVAL_S = 0.1


class Progress:
    """A context that shows how a batch of requests gets on; shows nothing when `show` is False."""

    def __init__(self, total: int, engine: Engine, show: bool) -> None:
        self._stats, self._bar = engine.core.last_step, None
        if show and total:
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="req", file=sys.stderr, dynamic_ncols=True, leave=False)
        self._shown = perf_counter()
        self._before = self._counters()

    def update(self, num_finished: int) -> None:
        if self._bar is None:
            return
        now = perf_counter()
        if not num_finished and now - self._shown < _INTERVAL_S:
            return
        self._shown = now
        prefill, decode = self.rates()
        self._bar.set_postfix_str(f"prefill {prefill:.0f} tok/s, decode {decode:.0f} tok/s", refresh=False)
        self._bar.update(num_finished)

    def rates(self) -> tuple[float, float]:
        """(prefill, decode) tokens a second since the start: prompt tokens over the seconds of the steps that computed
        any, and output tokens of all other steps over the seconds of those. 0 where there was no such step."""
        counted = [now - before for now, before in zip(self._counters(), self._before, strict=True)]
        prefill_tokens, prefill_s, decode_tokens, decode_s = counted
        return (
            prefill_tokens / prefill_s if prefill_tokens else 0.0,
            decode_tokens / decode_s if decode_tokens else 0.0,
        )

    def _counters(self) -> tuple[float, ...]:
        s = self._stats
        return s.total_prefill_tokens, s.prefill_s, s.decode_step_tokens, s.decode_s

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
