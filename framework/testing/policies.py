"""The contract suite of policies: what every policy must answer, whoever wrote it, and that tokens do not depend on it.

Each function of `CHECKS` takes a `PolicyCase` and raises AssertionError when a duty of `framework.interfaces.Policy` is
broken. Called by `run=check` and by tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from random import Random
from typing import Any

from framework.interfaces import Policy
from framework.nulls import NoConnector
from framework.request import Request
from framework.testing.checking import assert_all
from framework.testing.connector_engine import ConnectorEngine, make_request


@dataclass(frozen=True)
class PolicyCase:
    """The policy is built as target(options, None)."""

    target: Any
    options: Any = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.target.__name__)

    def build(self) -> Any:
        return self.target(self.options, None)


def _requests(count: int = 6) -> list[Request]:
    """Waiting and running ones of all sorts: long and short, urgent or not, with outputs, preempted before."""
    made = []
    for i in range(count):
        request = make_request(f"r{i}", range(2 + i * i % 7), 8, arrival=i, priority=(i * 5) % 3 - 1)
        request.token_ids += list(range(i % 4))
        request.num_computed_tokens = i % 3
        request.num_preemptions = i % 2
        made.append(request)
    return made


def _state(requests: Sequence[Request]) -> list[list[str]]:
    return [[repr(getattr(request, f.name)) for f in fields(request)] for request in requests]


def check_it_has_every_method(case: PolicyCase) -> None:
    missing = [name for name in ("order", "admit", "victim") if not callable(getattr(case.build(), name, None))]
    assert not missing, f"{case.name}: lacks {', '.join(missing)}; see framework.interfaces.Policy"
    assert isinstance(case.build(), Policy), f"{case.name}: is no framework.interfaces.Policy"


def check_order_is_a_permutation(case: PolicyCase) -> None:
    """Of none, of one, and of many: each request once, and the very same objects."""
    policy = case.build()
    for count in (0, 1, 6):
        waiting = _requests(count)
        Random(count).shuffle(waiting)
        given = list(waiting)
        ordered = list(policy.order(waiting))
        assert sorted(map(id, ordered)) == sorted(map(id, given)), (
            f"{case.name}: order gives {[r.request_id for r in ordered]} for {[r.request_id for r in given]}"
        )
        assert waiting == given, f"{case.name}: order changes the list that it was given, which is the scheduler's"


def check_admit_says_true_or_false(case: PolicyCase) -> None:
    policy, waiting = case.build(), _requests()
    for request in policy.order(waiting):
        for budget in (1, 7, 4096):
            answer = policy.admit(request, budget)
            assert isinstance(answer, bool), f"{case.name}: admit answers {answer!r}, which is neither True nor False"


def check_victim_is_one_of_those_that_run(case: PolicyCase) -> None:
    policy = case.build()
    for count in range(1, 7):
        running = _requests(count)
        policy.order(_requests(3))
        victim = policy.victim(running)
        assert any(victim is request for request in running), (
            f"{case.name}: victim names {victim!r}, which does not run"
        )


def check_requests_are_left_alone(case: PolicyCase) -> None:
    """A policy reads requests; the scheduler owns them."""
    policy, requests = case.build(), _requests()
    before = _state(requests)
    for request in policy.order(list(requests)):
        policy.admit(request, 16)
    policy.victim(list(requests))
    assert _state(requests) == before, f"{case.name}: changes a request"


def check_tokens_do_not_depend_on_it(case: PolicyCase) -> None:
    """Random arrivals in a pool that is too small, a step at a time: everybody ends with its own tokens."""
    for seed in range(3):
        _history(case, seed, max_in_flight=1)


def check_steps_in_flight_change_nothing(case: PolicyCase) -> None:
    """As above, with a step that is scheduled while another one runs."""
    for seed in range(3, 5):
        _history(case, seed, max_in_flight=2)


def _history(case: PolicyCase, seed: int, max_in_flight: int) -> None:
    random = Random(seed)
    with ConnectorEngine(
        NoConnector(), num_blocks=12, max_in_flight=max_in_flight, policy=case.build(), name=case.name
    ) as engine:
        requests = []
        for arrival in range(16):
            prompt = [random.randint(0, 40) for _ in range(random.randint(1, 20))]
            requests.append(make_request(f"r{arrival}", prompt, random.randint(4, 16), arrival=arrival))
            engine.add(requests[-1])
            for _ in range(random.randint(0, 3)):
                engine.step()
        engine.drain()
        left = [request.request_id for request in requests if request.finish_reason != "length"]
        assert not left, f"{case.name}: {', '.join(left)} never came to an end"


CHECKS = (
    check_it_has_every_method,
    check_order_is_a_permutation,
    check_admit_says_true_or_false,
    check_victim_is_one_of_those_that_run,
    check_requests_are_left_alone,
    check_tokens_do_not_depend_on_it,
    check_steps_in_flight_change_nothing,
)


def check_policy(case: PolicyCase) -> None:
    """Runs every check on the case."""
    assert_all(CHECKS, case)
