"""What stages say of token ids in a request that no vocabulary of this model holds. Called by their `validate`."""

from __future__ import annotations

from collections.abc import Iterable

from framework.errors import shown


def check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    """ValueError, naming field, id and range, for the first id outside of the vocabulary."""
    for i in ids:
        if not 0 <= i < vocab_size:
            raise ValueError(f"{field} holds {shown(i)}, outside the vocabulary 0..{vocab_size - 1}; leave it out")
