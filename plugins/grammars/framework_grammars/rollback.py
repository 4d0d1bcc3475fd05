"""How far a matcher may go back. Both libraries count differently, so that ours do."""

from __future__ import annotations


def check_rollback(n: int, num_taken: int, max_rollback: int) -> None:
    """ValueError for a rollback of more tokens than were taken, or than the budget that was declared."""
    if n > num_taken:
        raise ValueError(f"rollback of {n} tokens, but the matcher has taken {num_taken}")
    if n > max_rollback:
        raise ValueError(f"rollback of {n} tokens, but at most {max_rollback} can be taken back (max_rollback)")
