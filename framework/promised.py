"""What the public surface promises and is not built yet: refused by name, so that nobody takes it for a typing error.

The composer and the command line look here when they cannot find a word; delete an entry when its part is built.
"""

from __future__ import annotations

from collections.abc import Collection

from framework.errors import NotBuiltError

OPTIONS: dict[str, tuple[str, ...]] = {
    "backend": ("tpu",),
}
KEYS: tuple[str, ...] = ()


def refuse_option(group: str, option: str, built: Collection[str]) -> None:
    """NotBuiltError if the option is a promised one, or if the group has no member but `none`; returns otherwise."""
    if option in OPTIONS.get(group, ()) or set(built) == {"none"}:
        raise NotBuiltError(f"{group}={option} is not built yet. Built: {', '.join(sorted(built))}")


def refuse_key(key: str) -> None:
    """NotBuiltError if the key, or what it is under, is a promised one; returns otherwise."""
    if key.partition(".")[0] in KEYS:
        raise NotBuiltError(f"{key} is not built yet. Leave it out")
