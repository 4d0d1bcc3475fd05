"""The contract suite of KV connectors: what every connector must do, whoever wrote it, in checks that need no model.

A `ConnectorCase` says how to build the connector; each function of `CHECKS` takes a case and raises AssertionError when
a duty of `framework.interfaces.KVConnector` is broken. `connector_engine` drives it as the engine does; tests call in.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

import numpy as np

from framework.batch import SchedulerOutput
from framework.engine.connecting import is_layerwise
from framework.interfaces import ConnectorContext
from framework.testing.connector_engine import BLOCK_BYTES, BLOCK_SIZE, ConnectorEngine, make_request

CONTEXT = ConnectorContext(identity=b"one", block_size=BLOCK_SIZE, num_groups=1, block_bytes=BLOCK_BYTES)
PROMPT = list(range(18))  # four whole blocks and two tokens


@dataclass(frozen=True)
class ConnectorCase:
    """The connector is built as target(options(), ctx).

    options  makes the options of one check: engines of a check share them, and find each other's KV; another call gives
             options of a connector that holds nothing yet
    """

    target: Any
    options: Callable[[], Any]

    @property
    def name(self) -> str:
        return str(self.target.__name__)

    def engine(self, options: Any, **limits: Any) -> ConnectorEngine:
        return ConnectorEngine(self.target(options, CONTEXT), **limits)


def check_its_class_says_whether_it_is_layerwise(case: ConnectorCase) -> None:
    """An engine asks before it reads weights, and builds the connector behind them."""
    options = case.options()
    said, connector = is_layerwise(case.name, case.target, options), case.target(options, CONTEXT)
    found = bool(connector.layerwise)
    connector.close()
    assert found == said, f"{case.name}: its class says layerwise={said}, and once it is built it is {found}"


def check_second_engine_takes_what_the_first_one_stored(case: ConnectorCase) -> None:
    """Whole blocks, bit for bit, after the first one has ended; the last token is always computed."""
    options = case.options()
    _run_one(case, options)
    with case.engine(options) as second:
        request = make_request("b", PROMPT)
        second.run([request])
        assert request.num_cached_tokens == 16, f"{case.name}: {request.num_cached_tokens} tokens taken, 16 were stored"


def check_match_goes_on_from_the_local_hit_and_has_no_side_effects(case: ConnectorCase) -> None:
    options = case.options()
    connector = case.target(options, CONTEXT)
    request = make_request("new", PROMPT)
    assert connector.matched_tokens(request, 0) == (0, False), f"{case.name} has what nobody stored"
    connector.close()
    _run_one(case, options)
    connector = case.target(options, CONTEXT)
    answers = [connector.matched_tokens(request, local) for local in (0, 0, 8, 8, 16)]
    connector.close()
    assert answers[0] == answers[1] and answers[2] == answers[3], f"{case.name}: asking twice changes the answer"
    assert [count for count, _ in answers[::2]] == [16, 8, 0], f"{case.name}: {answers} behind 0, 8 and 16 tokens"
    assert answers[-1] == (0, False), f"{case.name}: nothing cannot load asynchronously"


def check_kv_of_another_kind_is_not_taken(case: ConnectorCase) -> None:
    """Another identity of the engine's KV, other tokens, salt or adapter."""
    options = case.options()
    _run_one(case, options)
    others = [
        (CONTEXT, make_request("salt", PROMPT, cache_salt="a")),
        (CONTEXT, make_request("lora", PROMPT, lora="a")),
        (CONTEXT, make_request("token", [7, *PROMPT[1:]])),
        (replace(CONTEXT, identity=b"two"), make_request("identity", PROMPT)),
    ]
    for ctx, request in others:
        connector = case.target(options, ctx)
        count, _ = connector.matched_tokens(request, 0)
        connector.close()
        assert count == 0, f"{case.name}: {count} tokens of another {request.request_id} are taken"


def check_metadata_changes_nothing_of_the_step(case: ConnectorCase) -> None:
    with case.engine(case.options()) as engine:
        inner = engine.connector.build_meta
        differences: list[str] = []

        def watched(scheduled: SchedulerOutput) -> Any:
            before = deepcopy(scheduled)
            meta = inner(scheduled)
            differences.extend(f.name for f in fields(before) if not _equal(before, scheduled, f.name))
            return meta

        engine.connector.build_meta = watched
        engine.run([make_request("a", PROMPT), make_request("b", PROMPT[3:], arrival=1)])
        assert not differences, f"{case.name}: build_meta changed {differences}"


def check_blocks_come_back_and_hold_what_they_should(case: ConnectorCase) -> None:
    """Random arrivals and aborts in a pool that is too small: nothing leaks, and no KV is another's."""
    for seed in range(2):
        _random_history(case, Random(seed), max_in_flight=1)


def check_sides_may_run_on_two_threads(case: ConnectorCase) -> None:
    """As above, while the worker side is a step behind on a thread of its own."""
    for seed in range(2, 4):
        _random_history(case, Random(seed), max_in_flight=2)


def check_failed_steps_leave_nothing_behind(case: ConnectorCase) -> None:
    """As above, and every few steps one fails between its loads and its stores."""
    for seed in range(4, 7):
        _random_history(case, Random(seed), max_in_flight=1 + seed % 2, failing=0.15)


def check_load_is_reported_when_its_request_has_gone(case: ConnectorCase) -> None:
    """Trivial for a connector whose loads are done within the step."""
    options = case.options()
    _run_one(case, options)
    with case.engine(options) as engine:
        engine.add(make_request("b", PROMPT))
        engine.step()
        engine.abort("b")
        engine.drain()


CHECKS = (
    check_its_class_says_whether_it_is_layerwise,
    check_second_engine_takes_what_the_first_one_stored,
    check_match_goes_on_from_the_local_hit_and_has_no_side_effects,
    check_kv_of_another_kind_is_not_taken,
    check_metadata_changes_nothing_of_the_step,
    check_blocks_come_back_and_hold_what_they_should,
    check_sides_may_run_on_two_threads,
    check_failed_steps_leave_nothing_behind,
    check_load_is_reported_when_its_request_has_gone,
)


def check_connector(case: ConnectorCase) -> None:
    """Every check at once."""
    for check in CHECKS:
        check(case)


def _run_one(case: ConnectorCase, options: Any) -> None:
    """An engine that computes PROMPT, and stores it."""
    with case.engine(options) as engine:
        engine.run([make_request("first", PROMPT)])


def _random_history(case: ConnectorCase, random: Random, max_in_flight: int, failing: float = 0.0) -> None:
    options = case.options()
    _run_one(case, options)  # so that there is something to load
    limits: dict[str, Any] = {"num_blocks": 14, "max_in_flight": max_in_flight, "prefix_caching": random.random() < 0.7}
    with case.engine(options, **limits) as engine:
        for arrival in range(24):
            shared, own = random.randint(0, 20), [random.randint(0, 40) for _ in range(random.randint(1, 6))]
            prompt = [*PROMPT, 18, 19][:shared] + own
            engine.add(make_request(str(arrival), prompt, random.randint(1, 8), arrival=arrival))
            for _ in range(random.randint(0, 4)):
                engine.step(fails=random.random() < failing)
            if random.random() < 0.1:
                engine.abort(str(random.randint(0, arrival)))
        engine.drain()


def _equal(before: SchedulerOutput, after: SchedulerOutput, name: str) -> bool:
    one, other = getattr(before, name), getattr(after, name)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    return repr(one) == repr(other)
