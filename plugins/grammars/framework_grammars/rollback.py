"""How far a matcher may go back. Both libraries count differently, so that ours do.

What their matchers have in common, and nothing of a grammar: `framework.interfaces.GrammarMatcher` says the rest.
"""

from __future__ import annotations

from typing import Any


class CountedMatcher:
    """A library's `matcher` with a count of the tokens that it has taken, which a subclass keeps in `accept`."""

    def __init__(self, matcher: Any, max_rollback: int) -> None:
        self._matcher, self._max_rollback, self._num_taken = matcher, max_rollback, 0

    def rollback(self, n: int) -> None:
        """ValueError for more tokens than were taken, or than the budget that was declared."""
        if n > self._num_taken:
            raise ValueError(f"rollback of {n} tokens, but the matcher has taken {self._num_taken}")
        if n > self._max_rollback:
            raise ValueError(
                f"rollback of {n} tokens, but at most {self._max_rollback} can be taken back (max_rollback)"
            )
        self._matcher.rollback(n)
        self._num_taken -= n
