"""The guard around a connector: what it owes is reported when it breaks or falls silent, and nothing else goes on."""

import logging
from time import monotonic

import numpy as np
import pytest

from framework.engine import guarded_connector
from framework.engine.guarded_connector import GuardedConnector
from framework.errors import KVMemoryError
from framework.nulls import NoConnector
from framework.request import Request, SamplingParams


class Told(NoConnector):
    """Answers what it was told to, keeps every stay, and raises in the method `fails`."""

    def __init__(self, is_async=False):
        self.is_async, self.fails, self.sent, self.received, self.closed = is_async, None, [], [], 0
        self.failed, self.close_fails = [], False

    def matched_tokens(self, request, num_computed_tokens):
        return 8, self.is_async

    def build_meta(self, scheduled):
        return "meta"

    def request_finished(self, request, blocks):
        return True

    def start_load(self, meta):
        if self.fails == "start_load":
            raise OSError("no route")

    def finished(self):
        return self.sent, self.received

    def failed_blocks(self):
        if self.fails == "failed_blocks":
            raise OSError("no route")
        failed, self.failed = self.failed, []
        return failed

    def close(self):
        self.closed += 1
        if self.close_fails:
            raise OSError("still open")


def guard(is_async=False):
    told = Told(is_async)
    return told, GuardedConnector(told, "kv_connector 'told' of acme 1.0", block_size=4)


def make_request():
    return Request("a", list(range(9)), SamplingParams(), seed=0, max_total_tokens=12)


def stay(connector, lease=0):
    """A request of 9 tokens whose first two blocks of three are loaded."""
    request = make_request()
    connector.matched_tokens(request, 0)
    request.lease, request.num_computed_tokens, request.block_ids = lease, 8, [[5, 6, 7]]
    connector.after_alloc(request, request.block_ids, 8)
    return request


def step(connector):
    """(sent, received, failed) of the worker side."""
    meta = connector.build_meta(None)
    connector.start_load(meta)
    return end(connector, meta)


def end(connector, meta):
    """(sent, received, failed) of the step of `meta`, which has computed."""
    connector.wait_saves(meta)
    sent, received = connector.finished()
    return list(sent), list(received), list(connector.failed_blocks())


def test_blocks_of_a_load_within_the_step_are_failed_when_the_connector_raises(caplog):
    told, connector = guard()
    stay(connector)
    told.fails = "start_load"
    with caplog.at_level(logging.ERROR):
        assert step(connector) == ([], [], [5, 6])
    assert "kv_connector 'told' of acme 1.0 raised in start_load" in caplog.text and told.closed == 1


def lose(connector):
    """A step that fails behind its loads."""
    meta = connector.build_meta(None)
    connector.start_load(meta)
    connector.step_lost(meta)


@pytest.mark.parametrize("is_async", [False, True])
def test_failed_block_of_a_lost_step_is_reported_if_its_load_is_still_open(is_async):
    told, connector = guard(is_async)
    stay(connector)
    lose(connector)
    told.failed, told.received = [5, 8], [0]
    assert step(connector) == (([], [0], [5]) if is_async else ([], [], [])), "5 may be another request's by now"


def test_connector_that_broke_in_a_lost_step_owes_no_load_within_it():
    told, connector = guard()
    stay(connector)
    told.fails = "start_load"
    lose(connector)
    assert step(connector) == ([], [], [])


@pytest.mark.parametrize("fails", [None, "failed_blocks"])
def test_load_within_a_step_fails_with_it_also_when_the_step_has_begun_before_others_ended(fails):
    told, connector = guard()
    first = connector.build_meta(None)
    connector.start_load(first)
    stay(connector)
    second = connector.build_meta(None)
    connector.start_load(second)
    told.failed, told.fails = [6], fails
    assert end(connector, first) == ([], [], [])
    assert end(connector, second) == ([], [], [5, 6] if fails else [6])


def test_load_of_an_earlier_step_is_not_failed_afterwards():
    told, connector = guard()
    stay(connector)
    assert step(connector) == ([], [], [])
    told.fails = "start_load"
    assert step(connector) == ([], [], [])


@pytest.mark.parametrize("method", ["start_load", "failed_blocks"])
def test_asynchronous_load_is_received_and_failed_when_the_connector_raises(method):
    told, connector = guard(is_async=True)
    stay(connector)
    told.fails = method
    assert step(connector) == ([], [0], [5, 6])
    assert connector.matched_tokens(None, 0) == (0, False), "it is not asked any more"


def test_load_whose_failures_cannot_be_asked_for_is_failed():
    told, connector = guard(is_async=True)
    stay(connector)
    step(connector)
    told.received, told.fails = [0], "failed_blocks"
    assert step(connector) == ([], [0], [5, 6])


def test_kept_stay_is_sent_when_the_connector_raises():
    told, connector = guard()
    request = stay(connector)
    step(connector)
    assert connector.request_finished(request, request.block_ids)
    told.fails = "start_load"
    assert step(connector) == ([0], [], [])
    assert not connector.request_finished(request, request.block_ids), "nothing more is kept"


@pytest.mark.parametrize("owed", ["load within the step", "load beside it", "kept stay"])
def test_blocks_of_a_connector_that_cannot_be_closed_go_to_nobody(owed):
    told, connector = guard(is_async=owed == "load beside it")
    request = stay(connector)
    if owed == "kept stay":
        step(connector)
        connector.request_finished(request, request.block_ids)
    told.fails, told.close_fails = "start_load", True
    message = r"kv_connector 'told' of acme 1.0 broke with 1 transfers under way and raised OSError\('still open'\)"
    for _ in range(2):
        with pytest.raises(KVMemoryError, match=message):
            step(connector)


def test_connector_that_cannot_be_closed_and_owes_nothing_is_left_alone(caplog):
    told, connector = guard()
    told.fails, told.close_fails = "start_load", True
    assert step(connector) == step(connector) == ([], [], [])
    assert "raised in close" in caplog.text and told.closed == 1


def test_load_promised_before_the_connector_broke_is_failed():
    _, connector = guard(is_async=True)
    request = stay(connector)
    step(connector)
    connector.matched_tokens(request, 0)
    connector._give_up()
    request.lease = 1
    connector.after_alloc(request, request.block_ids, 8)
    assert step(connector) == ([], [0, 1], [5, 6, 5, 6])


def test_reports_that_nobody_waits_for_go_no_further():
    told, connector = guard(is_async=True)
    request = stay(connector)
    connector.request_finished(request, request.block_ids)
    told.sent, told.received = [0, 0, 3], [7, 0]
    assert step(connector) == ([0], [0], [])
    assert step(connector) == ([], [], [])


@pytest.mark.parametrize("is_async", [False, True])
def test_connector_that_falls_silent_is_taken_for_broken(monkeypatch, caplog, is_async):
    told, connector = guard(is_async)
    request = stay(connector)
    step(connector)
    connector.request_finished(request, request.block_ids)
    assert step(connector) == ([], [], [])
    monkeypatch.setattr(guarded_connector, "OVERDUE_S", -1.0)
    assert step(connector) == ([0], [0] if is_async else [], [5, 6] if is_async else [])
    assert "has not reported leases [0]" in caplog.text and told.closed == 1


def test_request_that_is_to_be_asked_about_for_ever_is_computed(monkeypatch, caplog):
    told, connector = guard()
    told.matched_tokens = lambda request, num_computed_tokens: (None, True)
    first, second = make_request(), make_request()
    assert connector.matched_tokens(first, 0) == (None, True)
    monkeypatch.setattr(guarded_connector, "OVERDUE_S", 10.0)
    now = monotonic()
    monkeypatch.setattr(guarded_connector, "monotonic", lambda: now + 11)
    assert connector.matched_tokens(second, 0) == (None, True), "each request has a clock of its own"
    assert [connector.matched_tokens(first, 0)[0] for _ in range(2)] == [0, 0]
    assert caplog.text.count("kv_connector 'told' of acme 1.0 has answered `ask again` of request a for 10 s") == 1
    connector.after_alloc(first, [[1, 2, 3]], 0)
    assert connector.matched_tokens(first, 0) == (None, True), "another stay"
    assert told.closed == 0


def test_request_is_admitted_with_the_answer_that_was_given_last():
    _, connector = guard()
    first, second = make_request(), make_request()
    connector.matched_tokens(first, 0)
    connector.matched_tokens(second, 0)
    with pytest.raises(AssertionError, match="request a is admitted with an answer about another one"):
        connector.after_alloc(first, [[5, 6, 7]], 8)


def test_clock_of_a_request_that_has_gone_is_forgotten():
    told, connector = guard()
    told.matched_tokens = lambda request, num_computed_tokens: (None, False)
    gone = make_request()
    connector.matched_tokens(gone, 0)
    gone.finish_reason = "abort"
    connector.matched_tokens(make_request(), 0)
    assert gone not in connector._unanswered


@pytest.mark.parametrize("waits_for", ["answer", "load", "kept stay", "nothing"])
def test_steps_without_rows_are_not_made_at_full_speed_while_the_connector_is_waited_for(monkeypatch, waits_for):
    told, connector = guard(is_async=waits_for == "load")
    slept = []
    monkeypatch.setattr(guarded_connector, "sleep", slept.append)
    if waits_for == "answer":
        told.matched_tokens = lambda request, num_computed_tokens: (None, False)
        connector.matched_tokens(make_request(), 0)
    elif waits_for != "nothing":
        request = stay(connector)
        step(connector)
        if waits_for == "kept stay":
            connector.request_finished(request, request.block_ids)
    connector.idle()
    assert len(slept) == (waits_for != "nothing") and all(0 < s <= guarded_connector.IDLE_S for s in slept)


def test_load_within_a_slow_step_is_not_overdue(monkeypatch, caplog):
    told, connector = guard()
    stay(connector)
    monkeypatch.setattr(guarded_connector, "OVERDUE_S", -1.0)
    assert step(connector) == ([], [], [])
    assert not caplog.text and told.closed == 0


@pytest.mark.parametrize(
    ("method", "answer", "reason"),
    [
        ("matched_tokens", 5, "cannot unpack"),
        ("matched_tokens", (-4, False), "a number of tokens is 0 or more"),
        ("matched_tokens", (True, False), "a number of tokens is 0 or more"),
        ("matched_tokens", (2.5, False), "'float' object cannot be interpreted as an integer"),
        ("matched_tokens", ("4", False), "'str' object cannot be interpreted as an integer"),
        ("matched_tokens", (8, None), "neither True nor False"),
        ("request_finished", None, "neither True nor False"),
        ("request_preempted", 1, "neither True nor False"),
        ("finished", None, "cannot unpack"),
        ("finished", ([0], None), "not iterable"),
        ("failed_blocks", None, "not iterable"),
        ("failed_blocks", ["5"], "cannot be interpreted as an integer"),
    ],
)
def test_wrong_answer_names_the_connector_and_ends_it(caplog, method, answer, reason):
    told, connector = guard()
    setattr(told, method, lambda *args: answer)
    neutral = {"matched_tokens": (0, False), "finished": ([], []), "failed_blocks": []}.get(method, False)
    with caplog.at_level(logging.ERROR):
        if method == "failed_blocks":
            assert step(connector) == ([], [], [])
        else:
            assert getattr(connector, method)(*(() if method == "finished" else (make_request(), [[]]))) == neutral
    label, told_so = "kv_connector 'told' of acme 1.0", caplog.text
    assert f"{label} answered {answer!r} to {method}" in told_so and reason in told_so and told.closed == 1
    assert connector.matched_tokens(None, 0) == (0, False), "it is not asked any more"


def test_numbers_of_another_kind_are_taken_as_they_are():
    told, connector = guard()
    told.matched_tokens = lambda request, num_computed_tokens: (np.int64(8), False)
    count, _ = connector.matched_tokens(None, 0)
    assert (count, type(count)) == (8, int)


def test_null_metadata_stays_null():
    _, connector = guard()
    connector._connector.build_meta = lambda scheduled: None
    assert connector.build_meta(None) is None


def test_close_that_raises_is_called_once(caplog):
    told, connector = guard()
    told.close_fails = True
    connector.close()
    connector.close()
    assert told.closed == 1 and caplog.text.count("raised in close") == 1
