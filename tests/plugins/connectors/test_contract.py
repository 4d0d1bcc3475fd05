"""Every connector of ours passes the contract suite, around faults as well, and the suite finds one that does not."""

from itertools import count

import pytest

from framework.errors import PluginError
from framework.plugins import registry
from framework.testing.connector import CHECKS, ConnectorCase
from framework.testing.connector_faults import FaultyConnector
from framework.testing.fault_options import FaultOptions
from framework_connectors.block_store import drop_store
from framework_connectors.memory import MemoryConnector
from framework_connectors.options import MemoryOptions

_numbers = count()
CAPACITY = 1 << 20


def fresh_store():
    name = f"contract-{next(_numbers)}"
    drop_store(name)
    return name


def memory(**options):
    return ConnectorCase(MemoryConnector, lambda: MemoryOptions(fresh_store(), CAPACITY, **options))


def faulty(is_async, **faults):
    def options():
        inner = {"store": fresh_store(), "capacity_bytes": CAPACITY, "async_loads": is_async}
        return FaultOptions("memory", inner, **faults)

    return ConnectorCase(FaultyConnector, options)


CASES = {"memory": memory(), "memory beside the steps": memory(async_loads=True)}
HISTORIES = [check for check in CHECKS if "threads" in check.__name__ or "failed_steps" in check.__name__]
FAULTS = {
    "late": {"late_saves": 3},
    "failed": {"failed_loads": 0.5},
    "dropped": {"dropped_loads": 0.4, "dropped_saves": 0.4},
    "reordered": {"reorder": True},
    "everything": {"late_saves": 2, "failed_loads": 0.3, "dropped_loads": 0.2, "dropped_saves": 0.2, "reorder": True},
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", CASES)
def test_connector_keeps_its_contract(name, check):
    check(CASES[name])


@pytest.mark.parametrize("check", HISTORIES, ids=lambda check: check.__name__)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_such_as_the_contract_allows(fault, is_async, check):
    check(faulty(is_async, **FAULTS[fault]))


class SharesSalts(MemoryConnector):
    def _keys(self, request, index):
        tokens = tuple(request.token_ids[: (index + 1) * self._ctx.block_size])
        return [(self._ctx.identity, tokens, group) for group in range(self._ctx.num_groups)]


class SharesModels(MemoryConnector):
    def _keys(self, request, index):
        return [(request.block_hashes[index], group) for group in range(self._ctx.num_groups)]


class NeverSends(MemoryConnector):
    def finished(self):
        return [], super().finished()[1]


class SendsTwice(MemoryConnector):
    def finished(self):
        sent, received = super().finished()
        return [*sent, *sent], received


class HidesFailures(MemoryConnector):
    def _load(self, load):
        """Loads nothing and says nothing."""


class StoresTooEarly(MemoryConnector):
    def _plan_saves(self, stay, blocks):
        request, committed = stay.request, stay.request.num_published_blocks
        request.num_published_blocks = max(committed, (request.num_tokens - 1) // self._ctx.block_size)
        super()._plan_saves(stay, blocks)
        request.num_published_blocks = committed


class Meddles(MemoryConnector):
    def build_meta(self, scheduled):
        scheduled.num_prompt_tokens += 1
        return super().build_meta(scheduled)


class Forgets(MemoryConnector):
    def step_lost(self, meta):
        """Leaves what the step had not begun unreported."""


class ChangesItsMind(MemoryConnector):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.layerwise = True


@pytest.mark.parametrize(
    ("broken", "check", "message"),
    [
        (ChangesItsMind, "layerwise", "its class says layerwise=False, and once it is built it is True"),
        (SharesSalts, "kv_of_another_kind", "16 tokens of another salt are taken"),
        (SharesModels, "kv_of_another_kind", "16 tokens of another identity are taken"),
        (NeverSends, "blocks_come_back", "NeverSends: .* blocks are free after .* kept"),
        (SendsTwice, "blocks_come_back", "SendsTwice reports lease .* as sent, which it does not keep"),
        (HidesFailures, "second_engine", "reads KV that is not its own, and no block of it was reported as failed"),
        (StoresTooEarly, "blocks_come_back", "reads KV that is not its own"),
        (Meddles, "metadata", r"build_meta changed \['num_prompt_tokens'"),
        (Forgets, "failed_steps", "blocks are free after .* kept"),
    ],
)
def test_suite_finds_what_is_broken(broken, check, message):
    case = ConnectorCase(broken, lambda: MemoryOptions(fresh_store(), CAPACITY))
    (found,) = [one for one in CHECKS if check in one.__name__]
    with pytest.raises(AssertionError, match=message):
        found(case)


def test_faulty_connector_needs_one_that_is_there():
    with pytest.raises(PluginError, match=r"kv_connector\.inner=memry: no installed .* Did you mean 'memory'"):
        FaultyConnector(FaultOptions("memry"), None)


def test_both_are_found_by_name():
    assert {spec.name for spec in registry().specs("kv_connector")} >= {"memory", "faulty"}
