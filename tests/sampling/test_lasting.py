"""Lasting fields come back with a preempted request, and with nobody else."""

import numpy as np
import pytest
import torch

from framework.batch import Field, NewRequest
from framework.interfaces import StageSpec
from framework.request import SamplingParams
from framework.sampling import lasting
from framework.sampling.deployed import Deployed
from framework.sampling.lasting import LastingState
from framework.testing.stages import context

SPEC = StageSpec(
    "counting", kind="select", fields=(Field("count", "int32", width=2, lasting=True), Field("other", "int32"))
)


def request(row, request_id, num_outputs=0):
    return NewRequest(row, request_id, np.zeros(3 + num_outputs, np.int32), 3, 0, SamplingParams(), 0)


@pytest.fixture
def ctx():
    return context(SPEC)


@pytest.fixture
def state(ctx):
    return LastingState([Deployed("counting", SPEC, None, ctx, 1)])


def count(ctx):
    return ctx.column("count").dev


def preempted(state, ctx, row, request_id, value):
    state.add(request(row, request_id))
    state.give_back()
    count(ctx)[row] = value
    ctx.column("other").dev[row] = 9
    state.preempt(row)
    state.release(row)
    count(ctx)[row] = ctx.column("other").dev[row] = -1  # the row is somebody else's


def test_a_request_that_comes_back_to_another_row_finds_its_lasting_fields(state, ctx):
    preempted(state, ctx, 1, "a", torch.tensor([3, 4], dtype=torch.int32))
    state.add(request(2, "a", num_outputs=1))
    assert count(ctx)[2].tolist() == [0, 0]
    state.give_back()
    assert count(ctx)[2].tolist() == [3, 4]
    assert ctx.column("other").dev[2] == 0


def test_a_new_request_of_the_same_id_finds_nothing(state, ctx):
    preempted(state, ctx, 1, "a", 3)
    state.add(request(2, "a"))
    state.give_back()
    state.preempt(2)
    assert count(ctx)[2].tolist() == [0, 0]


def test_what_came_back_with_a_request_is_kept_though_its_step_failed(state, ctx):
    preempted(state, ctx, 1, "a", 3)
    state.add(request(2, "a", num_outputs=1))
    state.preempt(2)  # the step failed before the rows were on the device
    state.release(2)
    state.add(request(3, "a", num_outputs=1))
    state.give_back()
    assert count(ctx)[3].tolist() == [3, 3]


def test_a_request_that_ended_leaves_nothing(state, ctx):
    state.add(request(1, "a"))
    state.release(1)
    state.preempt(1)
    state.add(request(1, "a", num_outputs=1))
    count(ctx)[1] = 7
    state.give_back()
    assert count(ctx)[1].tolist() == [7, 7]


def test_the_oldest_go_when_too_many_are_kept(state, ctx, monkeypatch):
    monkeypatch.setattr(lasting, "MAX_KEPT", 2)
    for value, request_id in enumerate("abc", start=1):
        preempted(state, ctx, 1, request_id, value)
    found = []
    for row, request_id in enumerate("abc", start=1):
        count(ctx)[row] = 0
        state.add(request(row, request_id, num_outputs=1))
        state.give_back()
        found.append(int(count(ctx)[row, 0]))
    assert found == [0, 2, 3]


def test_a_field_is_not_pooled_and_lasting():
    with pytest.raises(ValueError, match=r"field 'mu' cannot be both pooled and lasting"):
        Field("mu", "float32", pooled=True, lasting=True)
