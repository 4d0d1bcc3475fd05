"""docs/performance.md says how steps run on a device: its numbers, keys and parts are those of the code."""

import re
from types import SimpleNamespace

import pytest

from framework.config import compose
from framework.engine.stats import StepStats
from framework.interfaces import BackendContext
from framework.plugins import registry
from framework.sampling.captured import MAX_SETS, NUM_TOP

from .pages import ROOT

pytest.importorskip("triton")  # it exists for Linux alone

PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")


def rows(heading):
    """First cells of the table's rows below a heading, or below a line that ends in a colon."""
    section = PAGE[PAGE.index(heading) :]
    lines = section[section.index("|---") :].split("\n\n")[0].splitlines()[1:]
    return [line.strip("| ").split(" | ")[0] for line in lines]


def test_buckets_are_those_of_the_backend():
    from framework_backends.cuda import CudaBackend

    backend = object.__new__(CudaBackend)
    backend._captures = BackendContext().graphs != "off"
    buckets = backend.buckets(4096, 8192)
    assert [one.requests for one in buckets if one.query_len == 1] == [1, 2, 4, *range(8, 513, 8)]
    prompts = [one.tokens for one in buckets if one.query_len > 1]
    assert prompts[:16] == list(range(64, 1025, 64)) and prompts[16] - prompts[15] == prompts[15] // 8
    assert "by 64 tokens up to 1,024, and by an eighth at most behind that" in PAGE
    assert "1, 2, 4 and the multiples of 8, up to `scheduler.max_num_seqs` or 512" in PAGE


def test_variants_are_those_of_captured_samplers():
    *most, last = NUM_TOP
    assert f"for up to {', '.join(map(str, most))} or {last} best tokens" in PAGE
    assert f"logprobs of listed ids, of more than {last} tokens" in PAGE
    assert f"wants a {ORDINALS[MAX_SETS]} set of stages beside the plain one" in PAGE


def test_limits_are_those_of_the_backend():
    from framework_backends.cuda import CudaBackend
    from framework_backends.cuda_linear import FEW, SOME
    from framework_backends.cuda_memory import DEFAULT_FRACTION
    from framework_backends.cuda_transfers import _LARGEST_OUTBOX

    assert f"Up to {FEW} rows share the tile" in PAGE and f"up to {SOME} rows programs share out" in PAGE
    assert f"`kv_cache.memory_fraction` of the device ({DEFAULT_FRACTION} unless it is set)" in PAGE
    assert f"({CudaBackend.max_num_batched_tokens} unless it is set)" in PAGE
    assert f"of more than {_LARGEST_OUTBOX >> 10} KiB" in PAGE
    assert CudaBackend.max_in_flight == 2 and "The host is two steps ahead." in PAGE


def test_parts_of_the_host_are_those_that_steps_are_timed_by():
    known = re.search(r"seconds by part: ([\w, ]+)\.", StepStats.__doc__)[1].split(", ")
    told = [cell.strip("`") for cell in rows("What the host does in a decode step")]
    assert set(told) < set(known) and set(known) - set(told) == {"plan", "sample"}


def test_keys_and_their_defaults_are_those_of_the_configuration():
    config = compose([])
    for cell in rows("## Keys"):
        owner, _, name = cell.strip("`").partition(".")
        assert hasattr(getattr(config, owner), name or "name"), cell
    shown = dict(re.findall(r"^\| `([\w.]+)` \| `?(\w+)`?[ :|]", PAGE[PAGE.index("## Keys") :], re.MULTILINE))
    values = {key: getattr(getattr(config, key.split(".")[0]), key.partition(".")[2] or "name") for key in shown}
    words = {None: "null", True: "true", False: "false"}
    assert shown == {key: str(words.get(value, value)) for key, value in values.items()}


def test_compatibility_page_tells_stages_inside_of_captured_steps_from_those_behind():
    from framework.sampling.captured import _may_be_captured
    from framework_backends.triton.sampler_ops import TritonSamplerOps

    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    section = page.partition("## Sampler stages and modes")[2].partition("## Sampler stages with each other")[0]
    told = dict(re.findall(r"^\| `(\w+)` \|.*\| (inside|behind)[ ,]", section, re.MULTILINE))
    specs = {one.name: registry().load_target("stage", one.name).spec for one in registry().specs("stage")}
    ops = SimpleNamespace(fuses=TritonSamplerOps.fuses)
    inside = {
        name
        for name, spec in specs.items()
        if _may_be_captured(SimpleNamespace(spec=spec, keeps=spec.caps.keeps.__contains__), ops)
        and (spec.kind != "select" or spec.fused in ops.fuses)
    }
    assert told == {name: "inside" if name in inside else "behind" for name in specs}
