"""Responses that are kept so that others may follow them: in memory, up to a size, the oldest given up first.

Belongs to one service and its event loop; called by `responses`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST = 1000
MOST_CHARACTERS = 32 * 2**20


@dataclass(frozen=True)
class Stored:
    """body: the response as it was answered. messages: the conversation with it, but for the instructions."""

    body: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]

    @property
    def size(self) -> int:
        return len(str(self.body)) + len(str(self.messages))


class ResponseStore:
    """most, most_characters: responses kept, and their length together, conversations included."""

    def __init__(self, most: int = MOST, most_characters: int = MOST_CHARACTERS) -> None:
        self._most, self._most_characters = most, most_characters
        self._kept: dict[str, tuple[Stored, int]] = {}
        self._size = 0

    def keep(self, stored: Stored) -> None:
        size = stored.size
        self._kept[stored.body["id"]] = stored, size
        self._size += size
        while len(self._kept) > self._most or self._size > self._most_characters:
            self.give_up(next(iter(self._kept)))

    def get(self, response_id: str) -> Stored | None:
        found = self._kept.get(response_id)
        return None if found is None else found[0]

    def give_up(self, response_id: str) -> bool:
        """False when it was not kept."""
        found = self._kept.pop(response_id, None)
        self._size -= 0 if found is None else found[1]
        return found is not None
