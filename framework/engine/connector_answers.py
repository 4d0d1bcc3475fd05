"""What answers of a KV connector must be: each function gives an answer in its plain form, or raises for a wrong one.

Only types and ranges are looked at here. `GuardedConnector` asks, and ends the connector whose answer is no answer.
"""

from __future__ import annotations

from operator import index
from typing import Any


def anything(answer: Any) -> Any:
    return answer


def match(answer: Any) -> tuple[int | None, bool]:
    """(tokens, or None for `ask again`; whether they load asynchronously)."""
    count, is_async = answer
    if count is None:
        return None, claim(is_async)
    if isinstance(count, bool) or index(count) < 0:
        raise ValueError("a number of tokens is 0 or more")
    return index(count), claim(is_async)


def claim(answer: Any) -> bool:
    if not isinstance(answer, bool):
        raise TypeError("neither True nor False")
    return answer


def numbers(answer: Any) -> list[int]:
    """Leases or blocks."""
    return [index(number) for number in answer]


def reports(answer: Any) -> tuple[list[int], list[int]]:
    """(sent, received)."""
    sent, received = answer
    return numbers(sent), numbers(received)
