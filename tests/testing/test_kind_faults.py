"""The suites of policies, schedulers, attention, loaders and backends catch what is planted in ours."""

from dataclasses import replace

import pytest
import torch

from framework.batch import NULL_BLOCK
from framework.interfaces import BackendContext
from framework.layers import ops
from framework.scheduler import Scheduler
from framework.testing import attention_suite, backends, loaders, policies, schedulers
from framework.testing.attention_suite import AttentionPlugin
from framework.testing.backends import BackendCase
from framework.testing.checking import name_of, run_check
from framework.testing.policies import PolicyCase
from framework.testing.schedulers import SchedulerCase
from framework_attention.cpu import CpuAttention
from framework_backends.cpu import CpuBackend
from framework_loaders.safetensors import SafetensorsLoader, SafetensorsSource
from framework_schedulers.policies import Fcfs


def host(dtype):
    return CpuBackend({}, BackendContext(str(dtype).removeprefix("torch.")))


class LosesOne(Fcfs):
    def order(self, waiting):
        return super().order(waiting)[1:]


class CopiesRequests(Fcfs):
    def order(self, waiting):
        from copy import copy

        return [copy(request) for request in waiting]


class SortsTheSchedulersList(Fcfs):
    def order(self, waiting):
        waiting.sort(key=lambda request: -request.arrival_index)
        return waiting


class AnswersNone(Fcfs):
    def admit(self, request, budget):
        return None


class NamesAStranger(Fcfs):
    def order(self, waiting):
        self.last = [*getattr(self, "last", []), *waiting]
        return super().order(waiting)

    def victim(self, running):
        return self.last[0]


class DisplacesTheFirst(Fcfs):
    def victim(self, running):
        return running[0]


class MarksRequests(Fcfs):
    def admit(self, request, budget):
        request.priority -= 1
        return True


class ForgetsABlock(Scheduler):
    def update(self, scheduled, output):
        news = super().update(scheduled, output)
        if news and news[0].finish_reason and self.pool.num_free and not hasattr(self, "lost"):
            self.lost = self.pool.allocate(1)
        return news


class TakesTooMany(Scheduler):
    def __init__(self, options, ctx):
        from dataclasses import replace

        super().__init__(options, replace(ctx, max_num_batched_tokens=64))


class TakesTheImpossible(Scheduler):
    def check_request(self, request):
        pass


class IgnoresStop(Scheduler):
    def stop(self, request_id, stop_string):
        return self.abort(request_id)


class ForgetsTheWindow(CpuAttention):
    def bind(self, layers, kv):
        super().bind([replace(layer, window=None) for layer in layers], kv)


class ForgetsTheSinks(CpuAttention):
    def bind(self, layers, kv):
        super().bind([replace(layer, sinks=None) for layer in layers], kv)


class CapsBehindTheScale(CpuAttention):
    def bind(self, layers, kv):
        super().bind([replace(layer, softcap=layer.softcap and layer.softcap * layer.scale) for layer in layers], kv)


class GathersAllBlocks(CpuAttention):
    """Masks what is behind the window, and multiplies it by 0."""

    def plan(self, batch, group):
        plan = super().plan(batch, group)
        for span in plan._spans:
            rows = batch.block_table[group][batch.rows_np, :1].long()
            span.blocks[:, -1:] = torch.where(span.blocks[:, -1:] == NULL_BLOCK, rows[:1], span.blocks[:, -1:])
        return plan


class TurnsBeforeItNormalises(CpuAttention):
    """Of norms and a rotation the order counts; alone each is right."""

    def plan(self, batch, group):
        plan, specs = super().plan(batch, group), self._layers

        class Projects:
            def forward_projections(self, layer, heads, rotation, norms):
                spec = specs[layer].spec
                q, k, v = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
                if rotation is not None:
                    cos, sin = rotation.table[rotation.positions].unsqueeze(2).unbind(1)
                    q, k = ops.rotate(q, cos, sin), ops.rotate(k, cos, sin)
                if norms is not None:
                    q, k = ops.rms_norm(q, norms.q_weight, norms.eps), ops.rms_norm(k, norms.k_weight, norms.eps)
                return plan.forward(layer, q, k, v)

            forward = plan.forward

        return Projects()


class LeavesPaddingAsItIs(CpuAttention):
    def plan(self, batch, group):
        plan = super().plan(batch, group)

        class Padded:
            def forward(self, layer, q, k, v):
                out = plan.forward(layer, q, k, v)
                out[sum(batch.num_scheduled_tokens_np.tolist()) :] = 1
                return out

        return Padded()


class TrustsHostTwins(CpuAttention):
    """Reads rows of the host: those of a recorded step are nobody's."""

    caps = replace(CpuAttention.caps, graph="decode")


class WritesPaddingToTheLastBlock(CpuAttention):
    def bind(self, layers, kv):
        super().bind(layers, kv)
        self.kv = kv[0]

    def plan(self, batch, group):
        self.kv.select(2, self.kv.shape[2] - 1).fill_(NULL_BLOCK)
        return super().plan(batch, group)


class CopiesOneByOne(CpuBackend):
    def copy_blocks(self, kv, specs, pairs):
        for pair in pairs:
            super().copy_blocks(kv, specs, [pair])


class LosesTheBias(CpuBackend):
    def pack_linear(self, weight, bias=None):
        return super().pack_linear(weight)


class SwallowsErrors(CpuBackend):
    def submit(self, executable, args, collect):
        def quietly(*given):
            try:
                return executable(*given)
            except ZeroDivisionError:
                return 42

        return super().submit(quietly, args, collect)


class AnyShape(SafetensorsSource):
    def take(self, name, shape, dtype=None):
        return super().take(name, self._shapes[name], dtype)


class LoadsAnyShape(SafetensorsLoader):
    def open(self, checkpoint, *, dtype, device, seed):
        return AnyShape(checkpoint.location, dtype, device)


FAULTS = [
    (policies.CHECKS, PolicyCase(LosesOne), "order is a permutation", "LosesOne: order gives"),
    (policies.CHECKS, PolicyCase(CopiesRequests), "order is a permutation", "CopiesRequests: order gives"),
    (policies.CHECKS, PolicyCase(SortsTheSchedulersList), "order is a permutation", "changes the list"),
    (policies.CHECKS, PolicyCase(AnswersNone), "admit says true or false", "admit answers None"),
    (policies.CHECKS, PolicyCase(NamesAStranger), "victim is one of those that run", "which does not run"),
    (policies.CHECKS, PolicyCase(DisplacesTheFirst), "tokens do not depend on it", "loading [], not ended ['r"),
    (policies.CHECKS, PolicyCase(MarksRequests), "requests are left alone", "changes a request"),
    (schedulers.CHECKS, SchedulerCase(ForgetsABlock), "every request gets its tokens", "are free"),
    (schedulers.CHECKS, SchedulerCase(TakesTooMany), "every request gets its tokens", "TakesTooMany: a step of"),
    (schedulers.CHECKS, SchedulerCase(TakesTheImpossible), "impossible request is refused", "takes a request of 16"),
    (schedulers.CHECKS, SchedulerCase(IgnoresStop), "stop string ends with stop", "says ('abort', None)"),
    (attention_suite.CHECKS, AttentionPlugin(ForgetsTheWindow, host), "output equals the reference", "case window"),
    (attention_suite.CHECKS, AttentionPlugin(ForgetsTheSinks, host), "output equals the reference", "case sinks"),
    (attention_suite.CHECKS, AttentionPlugin(CapsBehindTheScale, host), "output equals the reference", "case softcap"),
    (attention_suite.CHECKS, AttentionPlugin(GathersAllBlocks, host), "blocks behind the window are not read",
     "with a block of another request behind its window"),
    (attention_suite.CHECKS, AttentionPlugin(TurnsBeforeItNormalises, host),
     "projections give what turned heads give", "(rotation, norms) = (True, True)"),
    (attention_suite.CHECKS, AttentionPlugin(LeavesPaddingAsItIs, host), "padding gives zero", "for padding"),
    (attention_suite.CHECKS, AttentionPlugin(TrustsHostTwins, host), "recorded steps serve other requests",
     "recorded for others"),
    (attention_suite.CHECKS, AttentionPlugin(WritesPaddingToTheLastBlock, host), "blocks of others are left alone",
     "which no request has"),
    (backends.CHECKS, BackendCase(CopiesOneByOne), "copies read before they write", "reads what it has written"),
    (backends.CHECKS, BackendCase(LosesTheBias), "products", "is off by"),
    (backends.CHECKS, BackendCase(SwallowsErrors), "steps are submitted", "does not raise what the step raised"),
    (loaders.CHECKS, loaders.crafted(LoadsAnyShape, {}), "tensor of another shape is named", "of another shape"),
]  # fmt: skip


@pytest.mark.parametrize(("checks", "case", "check", "text"), FAULTS, ids=[fault[1].name for fault in FAULTS])
def test_planted_fault_is_caught_by_the_check_that_is_there_for_it(checks, case, check, text):
    (own,) = [each for each in checks if name_of(each) == check]  # the others may fail or not: a fault has many sides
    outcome = run_check(own, case)
    assert outcome.result == "failed" and text in outcome.reason, outcome


SOUND = [
    (policies.CHECKS, PolicyCase(Fcfs)),
    (schedulers.CHECKS, SchedulerCase(Scheduler)),
    (attention_suite.CHECKS, AttentionPlugin(CpuAttention, host)),
    (backends.CHECKS, BackendCase(CpuBackend)),
    (loaders.CHECKS, loaders.crafted(SafetensorsLoader, {})),
]


@pytest.mark.parametrize(("checks", "case"), SOUND, ids=[case.name for _, case in SOUND])
def test_ours_pass(checks, case):
    assert [one for one in (run_check(each, case) for each in checks) if one.result == "failed"] == []


def test_histories_of_the_suites_preempt(monkeypatch):
    """Else they would say little of victims and of requests that come back."""
    from framework.testing.connector_engine import ConnectorEngine

    counts, drain = [], ConnectorEngine.drain
    monkeypatch.setattr(
        ConnectorEngine, "drain", lambda self: (drain(self), counts.append(self.scheduler.stats()["num_preemptions"]))
    )
    policies.check_tokens_do_not_depend_on_it(PolicyCase(Fcfs))
    schedulers.check_every_request_gets_its_tokens(SchedulerCase(Scheduler))
    assert len(counts) == 6 and all(counts), counts
