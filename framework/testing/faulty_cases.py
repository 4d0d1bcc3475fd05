"""What `run=check` runs `kv_connector=faulty` with: around a connector that holds nothing yet, reports out of order."""

from __future__ import annotations

from functools import partial
from itertools import count

from framework.testing.connector import ConnectorCase
from framework.testing.connector_faults import FaultyConnector
from framework.testing.fault_options import FaultOptions

CAPACITY_BYTES = 1 << 20
_numbers = count()


def _options(is_async: bool) -> FaultOptions:
    store = f"check-faulty-{next(_numbers)}"
    inner = {"store": store, "capacity_bytes": CAPACITY_BYTES, "async_loads": is_async}
    return FaultOptions("memory", inner, reorder=True)


FAULTY = tuple(ConnectorCase(FaultyConnector, partial(_options, is_async)) for is_async in (False, True))
