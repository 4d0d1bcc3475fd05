"""What a server wants to find in the environment when torch is imported; what the user has set stays. No torch here.

For `run=serve`, and for `bench=serve`, whose server inherits it.
"""

from __future__ import annotations


def environment() -> dict[str, str]:
    """Threads that compute are not bound to cores: one that is bound draws the engine's thread and that of the event
    loop to the core of its own, since threads inherit where they may run, and waits there for its turn.

    16 streams of a small model on two cores, with their client: 63 tokens a second bound, 172 free.
    """
    return {"OMP_PROC_BIND": "false"}
