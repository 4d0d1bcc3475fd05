"""Few sets of stages serve a backend that compiles for each: the first ones, then one for all others."""

from dataclasses import replace

from framework import SamplingParams
from framework.interfaces import Capabilities
from framework.sampling.captured import MAX_SETS
from framework_backends.cpu_sampler_ops import CpuSamplerOps
from framework_samplers.temperature import Temperature

STAGES = ("temperature", "min_p", "top_k", "top_p", "gumbel")
WANTS = (
    {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 5, "top_p": 0.5}, {"top_k": 5, "min_p": 0.1},
    {"top_p": 0.5, "min_p": 0.1}, {"top_k": 5, "top_p": 0.5, "min_p": 0.1},
)  # fmt: skip


def test_the_first_sets_beside_the_plain_one_stay_and_one_serves_the_others(bench):
    pipeline = bench(*STAGES, ops=CpuSamplerOps()).pipeline
    wanted = [pipeline._bits_of(SamplingParams(**want)) for want in WANTS]
    rounded = [pipeline.captured.rounded(bits) for bits in wanted]
    plain = pipeline.captured.plain().bits
    assert rounded[:MAX_SETS] == [bits | plain for bits in wanted[:MAX_SETS]]
    assert len(set(rounded[MAX_SETS:])) == 1
    assert all(bits & ~rounded[-1] == 0 for bits in wanted)
    assert [pipeline.captured.rounded(bits) for bits in wanted] == rounded


def test_rows_that_only_draw_and_greedy_ones_share_the_plain_set(bench):
    pipeline = bench(*STAGES, ops=CpuSamplerOps()).pipeline
    plain = pipeline.captured.plain().bits
    for want in ({"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.3}):
        assert pipeline.captured.rounded(pipeline._bits_of(SamplingParams(**want))) == plain


class ReadsValues(Temperature):
    """No operation of a backend, and not for a graph."""

    spec = replace(Temperature.spec, name="reads_values", fused=None, caps=Capabilities(keeps=frozenset({"kept_set"})))

    def wants(self, params):
        return params.min_p > 0


def test_stages_that_no_captured_step_serves_are_not_rounded(bench):
    stages = ("temperature", "reads_values", "top_k", "gumbel")
    pipeline = bench(*stages, others={"reads_values": ReadsValues}, ops=CpuSamplerOps()).pipeline
    bits = pipeline._bits_of(SamplingParams(top_k=5, min_p=0.1))
    assert pipeline.captured.rounded(bits) == bits
    assert pipeline.captured._variant(bits, None) is None
