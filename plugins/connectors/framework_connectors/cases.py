"""What `run=check` runs the connectors of this package with: stores that nobody else uses."""

from __future__ import annotations

from itertools import count

from framework.testing.connector import ConnectorCase
from framework_connectors.memory import MemoryConnector
from framework_connectors.options import MemoryOptions

CAPACITY_BYTES = 1 << 20
_numbers = count()


def fresh(is_async: bool) -> MemoryOptions:
    return MemoryOptions(f"check-{next(_numbers)}", CAPACITY_BYTES, is_async)


MEMORY = (
    ConnectorCase(MemoryConnector, lambda: fresh(False)),
    ConnectorCase(MemoryConnector, lambda: fresh(True)),
)
