"""Requests with a constraint in the scheduler: they wait for their grammar alone, and never run ahead of a token."""

import pickle

import numpy as np
import pytest

from framework.batch import StepOutput
from framework.scheduler import Scheduler
from framework.scheduler.constrained import grammar_rows

from .conftest import make_context, make_request


class Constraint:
    """A constraint by hand: ready when told so; over behind the token 9; allows what `mask` says."""

    num_words = 2

    def __init__(self, is_ready=True, mask=1):
        self.ready, self.mask, self.error, self.taken, self.waited = is_ready, mask, None, [], 0

    def is_ready(self):
        return self.ready

    def wait(self, timeout_s):
        self.waited += 1

    def fill(self, bits, drafts=()):
        assert len(bits) == 1 + len(drafts)
        bits[:] = self.mask
        bits[1:, 1] = drafts

    def take(self, token_ids, num_output_tokens):
        self.taken += token_ids
        if 8 in token_ids:
            self.error = "token 8 is refused"
        return 9 in token_ids


def scheduler(**changes):
    return Scheduler({}, make_context(**changes))


def add(one, name, prompt=(1, 2, 3), **fields):
    request = make_request(name, prompt, fields.pop("max_tokens", 8), arrival=len(one._requests), **fields)
    one.add_request(request)
    return request


def output(scheduled, token=5):
    rows = scheduled.num_rows
    return StepOutput(np.full((rows, 1), token, np.int32), scheduled.samples.astype(np.int32))


def run(one, token=5):
    scheduled = one.schedule()
    return scheduled, one.update(scheduled, output(scheduled, token))


def test_only_the_request_whose_grammar_is_compiled_waits():
    one, waits = scheduler(), Constraint(is_ready=False)
    add(one, "json", constraint=waits)
    free = add(one, "free")
    scheduled, _ = run(one)
    assert scheduled.rows.tolist() == [free.req_idx] and not waits.waited
    waits.ready = True
    scheduled, _ = run(one)
    assert scheduled.num_rows == 2


def test_engine_with_nothing_else_to_do_waits_for_the_compilation():
    one, waits = scheduler(), Constraint(is_ready=False)
    add(one, "json", constraint=waits)
    scheduled, news = run(one)
    assert scheduled.num_rows == 0 and waits.waited == 1 and not news and one.has_work()


def test_failed_compilation_ends_its_request_alone():
    one, fails = scheduler(), Constraint(is_ready=False)
    bad, good = add(one, "bad", constraint=fails), add(one, "good", constraint=Constraint())
    fails.error = "compile broke"
    _, news = run(one)
    assert [(n.request, n.finish_reason, n.error) for n in news if n.finish_reason] == [(bad, "error", "compile broke")]
    assert good.output_token_ids == [5] and bad.error == "compile broke" and one.has_work()


def test_failure_is_told_by_the_next_step_when_one_is_lost():
    one, fails = scheduler(), Constraint(is_ready=False)
    add(one, "bad", constraint=fails)
    fails.error = "compile broke"
    scheduled = one.schedule()
    lost = output(scheduled)
    lost.is_lost = True
    assert one.update(scheduled, lost) == [] and one.has_work()
    assert [n.error for n in run(one)[1]] == ["compile broke"] and not one.has_work()


def test_request_that_waits_for_its_grammar_can_be_aborted():
    one = scheduler()
    add(one, "json", constraint=Constraint(is_ready=False))
    assert one.abort("json").finish_reason == "abort"
    assert not one.has_work() and not one._compiling and not one._num_constrained


def test_masks_name_the_logits_rows_of_their_requests():
    one = scheduler(max_num_batched_tokens=11)
    for name, mask in (("a", None), ("b", 2), ("c", None), ("d", 4)):
        add(one, name, constraint=None if mask is None else Constraint(mask=mask))
    scheduled, _ = run(one)  # the chunk of d draws nothing
    assert scheduled.samples.tolist() == [True, True, True, False]
    assert scheduled.grammar_rows.logits_rows.tolist() == [1] and scheduled.grammar_rows.bits.tolist() == [[2, 2]]
    scheduled, _ = run(one)
    assert scheduled.grammar_rows.logits_rows.tolist() == [1, 3]
    assert scheduled.grammar_rows.bits.tolist() == [[2, 2], [4, 4]]


def test_steps_with_masks_never_go_on_and_those_without_do():
    one = scheduler()
    json = add(one, "json", constraint=Constraint())
    add(one, "free")
    assert not any(run(one)[0].goes_on for _ in range(3))
    one.abort("json")
    assert json.constraint.taken == [5, 5, 5]
    assert [run(one)[0].goes_on for _ in range(3)] == [False, True, True]
    assert one.schedule().grammar_rows is None


def test_request_with_a_constraint_has_one_token_in_flight_and_others_run_ahead():
    one = scheduler(max_in_flight=2)
    json, free = add(one, "json", constraint=Constraint()), add(one, "free")
    first, second = one.schedule(), one.schedule()
    assert first.num_rows == 2 and second.rows.tolist() == [free.req_idx] and second.grammar_rows is None
    one.update(first, output(first))
    assert json.constraint.taken == [5]
    third = one.schedule()
    assert third.num_rows == 2 and third.grammar_rows.logits_rows.tolist() == [0]


def test_chunks_of_a_prompt_run_ahead():
    one = scheduler(max_in_flight=2, max_num_batched_tokens=2)
    add(one, "json", constraint=Constraint())
    assert [one.schedule().num_scheduled_tokens.tolist() for _ in range(2)] == [[2], [1]]


def test_text_that_is_over_ends_its_request_with_stop():
    one = scheduler()
    request = add(one, "json", constraint=Constraint())
    _, (new,) = run(one, token=9)
    assert (new.finish_reason, new.stop_reason, new.token_ids) == ("stop", None, [9]) and not one.has_work()
    assert request.finish_reason == "stop"


def test_stop_goes_before_length_when_the_text_is_over():
    one = scheduler()
    add(one, "json", constraint=Constraint(), max_tokens=1)
    assert run(one, token=9)[1][0].finish_reason == "stop"


def test_token_that_ends_the_request_is_not_given_to_the_grammar():
    one = scheduler()
    request = add(one, "json", constraint=Constraint(), eos_token_ids=frozenset({9}))
    run(one)
    run(one, token=9)
    assert request.finish_reason == "stop" and request.constraint.taken == [5]


def test_refused_token_ends_its_request_alone_and_is_not_told():
    one = scheduler()
    json, free = add(one, "json", constraint=Constraint()), add(one, "free")
    _, news = run(one, token=8)
    assert [(n.request, n.token_ids, n.finish_reason) for n in news] == [(json, [], "error"), (free, [8], None)]
    assert json.error == "token 8 is refused"


@pytest.mark.parametrize("preempts", [False, True])
def test_preempted_request_goes_on_from_where_its_grammar_was(preempts):
    one = scheduler()
    request = add(one, "json", constraint=Constraint())
    run(one)
    if preempts:
        one.restart()
    run(one)
    assert request.constraint.taken == [5, 5] and request.num_preemptions == preempts


def test_tokens_of_a_step_that_came_back_after_a_preemption_are_not_taken():
    one = scheduler()
    request = add(one, "json", constraint=Constraint())
    scheduled = one.schedule()
    one.restart()
    one.update(scheduled, output(scheduled))
    assert request.constraint.taken == []


def test_step_with_masks_travels_as_plain_arrays():
    one = scheduler()
    add(one, "json", constraint=Constraint(mask=6))
    masks = pickle.loads(pickle.dumps(one.schedule().grammar_rows))
    assert masks.logits_rows.tolist() == [0] and masks.bits.tolist() == [[6, 6]]


def test_case_c6_request_with_drafts_has_a_mask_a_row_and_does_not_shift_those_behind_it():
    one = scheduler()
    spec, free = add(one, "spec", constraint=Constraint(mask=2)), add(one, "free")
    json = add(one, "json", constraint=Constraint(mask=4))
    one.schedule()
    (step,) = one._ledger._steps
    step.scheduled.num_drafts[:] = 2, 1, 0  # four were proposed for the first, two are left
    masks = grammar_rows(step, {spec: [21, 22], free: [23]})
    assert step.requests == [spec, free, json]
    assert masks.logits_rows.tolist() == [0, 1, 2, 5]
    assert masks.bits.tolist() == [[2, 2], [2, 21], [2, 22], [4, 4]]
