"""The stage contract suite notices every fault that it is there for."""

import pytest
import torch

from framework import SamplingParams
from framework.testing import stages
from framework.testing.stages import StageCase, check_stage
from framework_samplers.temperature import Temperature
from framework_samplers.top_k import TopK

WARM = (SamplingParams(temperature=0.5), SamplingParams(temperature=2.0))
FEW = (SamplingParams(top_k=3), SamplingParams(top_k=9))


def changed(base, **members):
    return type(base.__name__, (base,), members)


def keeps_the_old_row(self, req_idx, params, request):
    if self._inverse.np[req_idx] == 1:
        self._inverse.np[req_idx] = 1 / params.temperature


def reads_the_place(self, logits, rows):
    logits.mul_(self._inverse.dev[1 : len(logits) + 1].unsqueeze(1))


def reads_the_batch(self, logits, rows):
    logits.mul_(self._inverse.dev[rows.req_idx].unsqueeze(1)).sub_(logits.amax())


def changes_plain_rows(self, logits, rows):
    logits.mul_(self._inverse.dev[rows.req_idx].unsqueeze(1)).add_(1)


def changes_its_state(self, logits, rows):
    logits.mul_(self._inverse.dev[rows.req_idx].unsqueeze(1))
    self._inverse.dev[rows.req_idx] *= 0.5


def lets_masked_in(self, logits, rows):
    wanted = (self._inverse.dev[rows.req_idx] != 1).unsqueeze(1)
    logits.copy_(torch.where(wanted, logits.clamp(min=-100), logits))


def turns_round(self, logits, rows):
    wanted = (self._inverse.dev[rows.req_idx] != 1).unsqueeze(1)
    logits.mul_(torch.where(wanted, -1.0, 1.0)).copy_(torch.where(logits == torch.inf, -torch.inf, logits))


def writes_into_lo(self, logits, rows, lo, hi):
    new, hi = TopK.bounds(self, logits, rows, lo, hi)
    return lo.copy_(new), hi


def writes_into_logits(self, logits, rows, lo, hi):
    logits.sub_(1.0).add_(1.0)
    logits[:, 5] += 1
    return lo, hi


def widens(self, logits, rows, lo, hi):
    wanted = self._k.dev[rows.req_idx] > 0
    return torch.where(wanted, lo - 1, lo), hi


def empties(self, logits, rows, lo, hi):
    wanted = self._k.dev[rows.req_idx] > 0
    return torch.where(wanted, torch.full_like(lo, 1e30), lo), hi


def counts_in_an_attribute(self, rows, sampled, num_valid):
    self.count = getattr(self, "count", 0) + 1


def cools_with_the_count(self, logits, rows):
    inverse = self._inverse.dev[rows.req_idx].unsqueeze(1)
    logits.mul_(torch.where(inverse == 1, inverse, inverse + getattr(self, "count", 0)))


def writes_into_every_row(self, rows, sampled, num_valid):
    self._inverse.dev[rows.req_idx] = 0.5


FAULTS = (
    (
        stages.check_reused_row_keeps_nothing,
        "a reused row keeps something",
        Temperature,
        WARM,
        {"apply": cools_with_the_count, "commit": counts_in_an_attribute},
    ),
    (stages.check_plain_rows_pass_unchanged, "did not want it", Temperature, WARM, {"commit": writes_into_every_row}),
    (
        stages.check_reused_row_keeps_nothing,
        "keeps an old value",
        Temperature,
        WARM,
        {"add_request": keeps_the_old_row},
    ),
    (stages.check_shuffled_batch, "follow the place in the batch", Temperature, WARM, {"apply": reads_the_place}),
    (stages.check_neighbours_change_nothing, "neighbour changes row", Temperature, WARM, {"apply": reads_the_batch}),
    (stages.check_plain_rows_pass_unchanged, "did not want it", Temperature, WARM, {"apply": changes_plain_rows}),
    (stages.check_second_call_is_equal, "second call gives another", Temperature, WARM, {"apply": changes_its_state}),
    (stages.check_kept_set, "lets a masked token in", Temperature, WARM, {"apply": lets_masked_in}),
    (stages.check_argmax, "keep argmax and does not", Temperature, WARM, {"apply": turns_round}),
    (stages.check_wants_and_validate, "every request pays", Temperature, WARM, {"wants": lambda self, params: True}),
    (stages.check_wants_and_validate, "does not want", Temperature, WARM, {"wants": lambda self, params: False}),
    (stages.check_unused_stage_costs_nothing, "called", Temperature, WARM, {"wants": lambda self, params: True}),
    (stages.check_second_call_is_equal, "writes into the interval", TopK, FEW, {"bounds": writes_into_lo}),
    (stages.check_second_call_is_equal, "writes into the logits", TopK, FEW, {"bounds": writes_into_logits}),
    (stages.check_kept_set, "widens the interval", TopK, FEW, {"bounds": widens}),
    (stages.check_kept_set, "empties a row", TopK, FEW, {"bounds": empties}),
)


@pytest.mark.parametrize(("check", "text", "base", "wanting", "members"), FAULTS, ids=[f[1] for f in FAULTS])
def test_a_faulty_stage_is_named_with_its_fault(check, text, base, wanting, members):
    check(StageCase(base, wanting))
    with pytest.raises(AssertionError, match=f"^{base.spec.name}: .*{text}|^{base.spec.name}: {text}"):
        check(StageCase(changed(base, **members), wanting))


def test_extra_args_of_a_case_must_be_declared():
    params = (*WARM, SamplingParams(temperature=0.5, extra_args={"temperature": {"x": 1}}))
    lax = changed(Temperature, validate=lambda self, params: None)
    with pytest.raises(AssertionError, match=r"^temperature: StageSpec.extra_args lacks \['x'\]"):
        stages.check_wants_and_validate(StageCase(lax, params))


@pytest.mark.parametrize(("target", "wanting"), [(Temperature, WARM), (TopK, FEW)])
def test_a_sound_stage_passes(target, wanting):
    check_stage(StageCase(target, wanting))
