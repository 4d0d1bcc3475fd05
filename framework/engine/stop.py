"""Stop strings across the borders of tokens, and the text that must be held back for them.

Knows text alone: which token is being looked at, and what becomes of the request, is the completion's part.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches a growing text for its end; `match` is the stop string that has come, None before.

    Of several that are there at one time the one that begins first counts, then the longest. Nothing of a stop string
    is shown before it is known whether it comes whole: the longest end of the text that one begins with is held back.

        ... shown text | held back | what `add` brings
            [ the tail that is searched            ]
    """

    __slots__ = ("_include", "_initials", "_longest", "_num_held", "_passed", "_stops", "_tail", "match")

    def __init__(self, stops: Sequence[str], include_in_text: bool) -> None:
        self._stops, self._include = tuple(stops), include_in_text
        self._longest = max(map(len, self._stops))
        self._initials = frozenset(stop[0] for stop in self._stops)
        self._tail = ""
        self._num_held = 0  # letters at the end of the tail that are not shown yet
        self._passed = 0  # letters behind the tail in which nothing counts any more
        self.match: str | None = None

    def add(self, piece: str, rest: str = "", *, may_match: bool = True) -> str:
        """The text to show now that `piece` has come; after a match there is no more to come.

        rest       text behind the piece that may still change, see `Detokenizer.rest`: a stop string may lie in it
        may_match  False passes over every stop string that is whole by now
        """
        assert self.match is None, f"{piece!r} comes behind the stop string {self.match!r}"
        shown = len(self._tail) - self._num_held
        text = self._tail + piece
        if may_match:
            found = self._find(text + rest, len(self._tail) + self._passed)
            if found is not None:
                start, self.match = found
                end = start + len(self.match) if self._include else start
                return (text + rest)[shown:end]
        self._passed = 0 if may_match else len(rest)
        self._num_held = self._num_begun(text)
        cut = len(text) - self._num_held
        self._tail = text[max(0, len(text) - self._longest + 1) :]
        return text[shown:cut]

    def finish(self, end: str = "") -> str:
        """What was held back, and the `end` of the text behind it: no stop string comes any more."""
        return self._tail[len(self._tail) - self._num_held :] + end

    def _find(self, text: str, known: int) -> tuple[int, str] | None:
        """(place, stop string) of the one that counts, among those that end behind `known` letters of the text."""
        found = ((text.find(stop, max(0, known + 1 - len(stop))), stop) for stop in self._stops)
        return min(((at, stop) for at, stop in found if at >= 0), key=lambda f: (f[0], -len(f[1])), default=None)

    def _num_begun(self, text: str) -> int:
        """Length of the longest end of the text with which a stop string begins, and which is not the whole of it."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            end = text[at:]
            if text[at] in self._initials and any(stop.startswith(end) and stop != end for stop in self._stops):
                return len(end)
        return 0
