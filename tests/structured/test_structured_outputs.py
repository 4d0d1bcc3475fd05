"""Structured output from outside: both grammars, a step at a time and with steps in flight, over a crafted model."""

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from framework import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from framework.config import Config, EngineOptions, GrammarConfig, KVCacheConfig, ModelConfig, SchedulerConfig
from framework.engine.build import build_engine
from framework.engine.choice import choose
from framework.engine.reasons import automatic
from framework.errors import ConfigError, PluginError, RequestError
from framework.interfaces import Capabilities
from framework.plugins import ComponentSpec, Registry
from framework.scheduler import Scheduler
from framework.structured.vocabulary import read

from .crafted import END, SMALL, STOP, THINK_END
from .words import Words, WordsMatcher

SCHEMA = {
    "type": "object", "required": ["a", "b"], "additionalProperties": False,
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
}  # fmt: skip
SHORT = [
    "kv_cache.block_size=8",
    "engine.max_model_len=48",
    "kv_cache.num_blocks=9",
]  # of blocks: requests are preempted
PROMPTS = [[3 + i, 40, 50] for i in range(4)]


def asks(seed=0, max_tokens=40, **fields):
    constraint = {k: fields.pop(k) for k in ("json", "json_object", "regex", "choice", "grammar") if k in fields}
    return SamplingParams(structured_outputs=constraint, seed=seed, max_tokens=max_tokens, **fields)


def built(folder, *words):
    return LLM(folder, overrides=[*SMALL, *words])


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def grammar(request):
    return f"grammar={request.param}"


@pytest.fixture(scope="module", params=["false", "true"], ids=["sync", "async"])
def steps(request):
    return f"engine.async_scheduling={request.param}"


@pytest.fixture(scope="module")
def llm(folder, grammar, steps):
    with built(folder, grammar, steps) as made:
        yield made


def only(outputs):
    (output,) = outputs
    return output.outputs[0]


# ------------------------------------------------------------------------------------------ what comes out of it


def test_output_matches_its_constraint_and_ends_with_an_eos(llm):
    params = [asks(regex="[0-9]{2}-[a-f]+x", temperature=0.7), asks(choice=["yes", "no"]), asks(json=SCHEMA, seed=3),
              asks(grammar='root ::= "(" root ")" | "x"')]  # fmt: skip
    outputs = [o.outputs[0] for o in llm.generate(PROMPTS, params)]
    assert {o.finish_reason for o in outputs[1:3]} == {"stop"}
    assert all(o.token_ids[-1] in (END, STOP) and o.stop_reason is None for o in outputs[1:3])
    assert outputs[1].text in ("yes", "no")
    parsed = json.loads(outputs[2].text)
    assert isinstance(parsed["a"], int) and parsed["b"] in ("x", "y")
    assert outputs[0].text[2] == "-" and set(outputs[3].text) <= set("(x)")


def test_greedy_row_follows_its_grammar(llm):
    assert only(llm.generate([5], asks(choice=["no", "maybe"], temperature=0))).text in ("no", "maybe")


def test_neighbours_without_a_grammar_draw_what_they_draw_alone(llm):
    free = [SamplingParams(seed=i, max_tokens=20) for i in range(2)]
    alone = [only(llm.generate([p], one)).token_ids for p, one in zip(PROMPTS, free, strict=False)]
    mixed = llm.generate(PROMPTS, [free[0], asks(json=SCHEMA), free[1], asks(1, regex="[0-9]+")])
    # each draws at its own place: prompts 0 and 2
    assert mixed[0].outputs[0].token_ids == alone[0]
    assert mixed[2].outputs[0].token_ids == only(llm.generate([PROMPTS[2]], free[1])).token_ids


def test_constraint_that_allows_everything_changes_no_token(llm):
    free = SamplingParams(seed=5, max_tokens=12, allowed_token_ids=list(range(3, 200)))
    everything = free.replace(structured_outputs={"regex": r"(.|\n)*"})
    text = only(llm.generate([5], free))
    assert only(llm.generate([5], everything)).token_ids == text.token_ids or "\ufffd" in text.text


def test_padding_of_the_vocabulary_is_never_drawn(llm, folder):
    size = json.loads(Path(folder, "config.json").read_text())["vocab_size"]
    for seed in range(3):
        output = only(llm.generate([5], asks(seed, regex=r"(.|\n){4,}")))
        assert max(output.token_ids) < size - 7


def test_tokens_are_those_of_every_other_way_to_run(folder, grammar):
    params = [asks(i, json=SCHEMA) if i % 2 else SamplingParams(seed=i, max_tokens=12) for i in range(4)]

    def tokens(*words):
        with built(folder, grammar, *words) as llm:
            return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]

    expected = tokens()
    ways = (
        ["engine.async_scheduling=true"],
        ["scheduler.max_num_batched_tokens=2", "engine.async_scheduling=true"],
        SHORT,
        [*SHORT, "scheduler.preemption=swap"],
        ["scheduler.max_num_seqs=1"],
    )
    for words in ways:
        assert tokens(*words) == expected, words


def test_more_constraints_at_a_time_than_are_kept_are_all_served(folder, grammar, steps):
    with built(folder, grammar, steps, "grammar.max_compiled=2") as llm:
        outputs = llm.generate([[5]] * 24, [asks(i, regex=f"{i:02}x") for i in range(24)])
    assert [o.outputs[0].text for o in outputs] == [f"{i:02}x" for i in range(24)]


def test_prefix_hits_change_nothing(llm):
    prompt = list(range(3, 40))
    first, second = (llm.generate([prompt], asks(json=SCHEMA, seed=2))[0] for _ in range(2))
    assert second.num_cached_tokens == 32 and first.outputs[0].token_ids == second.outputs[0].token_ids


def test_each_completion_of_n_has_a_place_of_its_own(llm):
    one = only(llm.generate([5], asks(json=SCHEMA, seed=4)))
    outputs = llm.generate([5], asks(json=SCHEMA, seed=4, n=3))[0].outputs
    assert outputs[0].token_ids == one.token_ids
    for output in outputs:
        assert output.finish_reason != "stop" or json.loads(output.text)
    assert len({o.text for o in outputs}) > 1


# -------------------------------------------------------------------------------------------- where it may end


def test_min_tokens_and_a_grammar_end_validly_together(llm):
    output = only(llm.generate([5], asks(choice=["yes", "no"], min_tokens=8)))
    assert output.text in ("yes", "no") and (output.finish_reason, output.stop_reason) == ("stop", None)
    longer = only(llm.generate([5], asks(regex="[0-9]+", min_tokens=8, max_tokens=12)))
    assert len(longer.text) >= 8 and longer.text.isdecimal()


def test_ignore_eos_ends_with_the_text(llm):
    output = only(llm.generate([5], asks(choice=["yes", "no"], ignore_eos=True)))
    assert output.text in ("yes", "no") and output.finish_reason == "stop"
    assert not {END, STOP} & set(output.token_ids)


def test_stop_id_of_the_text_ends_it_only_where_it_is_whole(llm):
    one = llm.engine.tokenizer.token_to_id("1")
    output = only(llm.generate([5], asks(regex="[0-9]{4}", stop_token_ids=[one], ignore_eos=True)))
    assert len(output.token_ids) in (3, 4, 5) and output.token_ids[-1] == one and output.stop_reason == one
    assert one not in output.token_ids[:-1]


def test_length_ends_a_text_that_is_not_whole(llm):
    assert only(llm.generate([5], asks(regex="[0-9]{20}", max_tokens=5))).finish_reason == "length"


def test_stages_cannot_switch_the_grammar_off(llm):
    with pytest.raises(RequestError, match="stages cannot switch 'grammar' off"):
        llm.generate([5], asks(regex="a", stages={"grammar": False}))


def test_masks_that_leave_nothing_together_name_their_stages(llm):
    output = llm.generate([5], asks(choice=["yes"], allowed_token_ids=[7]))[0]
    assert output.outputs[0].finish_reason == "error" and "stages grammar, allowed_ids together mask" in output.error


# ---------------------------------------------------------------------------------------------------- thinking


def test_grammar_holds_behind_the_end_of_thinking(folder, grammar, steps):
    with built(folder, grammar, steps, "grammar.reasoning_end='</think>'") as llm:
        bias = {THINK_END: 6.0}
        output = only(llm.generate([5], asks(choice=["yes", "no"], logit_bias=bias, max_tokens=60, seed=1)))
        at = output.token_ids.index(THINK_END)
        answer = llm.engine.tokenizer.decode(output.token_ids[at:])
        assert at > 0 and answer in ("yes", "no") and not {END, STOP} & set(output.token_ids[:at])
        closed = only(llm.generate([5, END, 6, THINK_END, 7], asks(choice=["yes", "no"])))
        assert closed.text in ("yes", "no")
        before = only(
            llm.generate([6, THINK_END, END, 7], asks(choice=["yes"], logit_bias=bias, max_tokens=60, seed=1))
        )
        assert THINK_END in before.token_ids  # what an earlier turn has closed counts for nothing


def test_end_of_thinking_that_is_no_token_is_refused_at_start_up(folder):
    with pytest.raises(ConfigError, match=r"reasoning_end='</thought>' is no token of the model's vocabulary"):
        built(folder, "grammar.reasoning_end='</thought>'")


def test_end_of_thinking_that_can_never_come_is_refused(folder):
    with pytest.raises(ConfigError, match=r"reasoning_end='</think>' has no use with grammar=none"):
        built(folder, "grammar=none", "grammar.reasoning_end='</think>'")
    with pytest.raises(ConfigError, match=r"reasoning_end='<\|stop\|>' is an eos of the model, which ends requests"):
        built(folder, "grammar.reasoning_end='<|stop|>'")
    with (
        built(folder, "grammar.reasoning_end='</think>'") as llm,
        pytest.raises(RequestError, match=f"stop_token_ids holds {THINK_END}, grammar.reasoning_end: .*could never be"),
    ):
        llm.generate([5], asks(choice=["yes"], stop_token_ids=[4, THINK_END]))


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("field", "bad"),
    [("json", {"type": "nothing"}), ("regex", "a("), ("grammar", "root ::= x"), ("structural_tag", {"a": 1}),
     ("json", '{"type": ')],
)  # fmt: skip
def test_constraint_is_refused_at_admission_with_the_reason_and_nothing_has_run(llm, field, bad):
    before = llm.engine.stats()
    with pytest.raises(RequestError, match=rf"prompt 1: structured_outputs\.{field}"):
        llm.generate([[5], [6]], [SamplingParams(), SamplingParams(structured_outputs={field: bad})])
    assert llm.engine.stats() == before


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"json_object": False}, ValueError, "json_object must be True"),
        ({"choice": []}, ValueError, "choice must not be empty"),
        ({"choice": [""]}, ValueError, "choice must not hold an empty string"),
        ({"choice": ["a", 1]}, TypeError, "choice must hold strings only"),
        ({"regex": ""}, ValueError, "regex must not be empty"),
        ({"regex": 3}, TypeError, "regex must be a string"),
        ({"json": 3}, TypeError, "json must be a dict or JSON"),
        ({"json_object": 1}, TypeError, "json_object must be True or False"),
    ],
)
def test_wrong_value_is_refused_at_construction(fields, error, message):
    with pytest.raises(error, match=message):
        StructuredOutputsParams(**fields)
    with pytest.raises(error, match=rf"SamplingParams\.structured_outputs: .*{message}"):
        SamplingParams(structured_outputs=fields)


def test_grammar_none_refuses_with_the_way_out(folder):
    with (
        built(folder, "grammar=none") as llm,
        pytest.raises(RequestError, match=r"\.regex .*grammar=none\. Use .*auto"),
    ):
        llm.generate([5], asks(regex="a"))


def test_configured_default_serves_requests_without_parameters(folder):
    with built(folder, "sampler.structured_outputs={choice:[yes]}", "sampler.max_tokens=9") as llm:
        assert only(llm.generate([5])).text == "yes"


def test_library_is_imported_by_the_first_request_that_needs_it(folder):
    program = f"""
import sys
from framework import LLM, SamplingParams
with LLM({folder!r}, overrides={[*SMALL, "grammar=xgrammar"]!r}) as llm:
    llm.generate([5], SamplingParams(max_tokens=2))
    print("xgrammar" in sys.modules, "llguidance" in sys.modules)
    llm.generate([5], SamplingParams(structured_outputs={{"choice": ["yes"]}}))
    print("xgrammar" in sys.modules, "llguidance" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "False", "True", "False"]


def test_async_engine_builds_its_grammar_once_and_beside_its_steps(folder, grammar, monkeypatch):
    threads = []

    def watched(*args):
        threads.append(threading.current_thread().name)
        return read(*args)

    monkeypatch.setattr("framework.structured.grammars.read", watched)

    async def last(llm, params):
        return [output async for output in llm.generate([5], params)][-1].outputs[0].text

    async def texts():
        async with AsyncLLM(folder, overrides=[*SMALL, grammar]) as llm:
            return await asyncio.gather(
                *(last(llm, asks(choice=[c])) for c in ("yes", "no")), last(llm, SamplingParams())
            )

    assert asyncio.run(texts())[:2] == ["yes", "no"]
    assert len(threads) == 1 and threads[0] != "framework-engine"


def test_report_says_which_grammar_was_taken(folder):
    plugins = Registry.load()
    choice = choose(Config(model=ModelConfig(path=folder)), plugins)
    (reason,) = [r for r in automatic(choice, plugins) if r.key == "grammar"]
    assert reason.value == "xgrammar" and "usable too: llguidance" in reason.why


def test_another_grammar_is_a_reconfiguration_that_keeps_the_weights(folder):
    with built(folder, "grammar=none") as llm:
        model = llm.engine.loaded.model
        llm.reconfigure(["grammar=llguidance"])
        assert only(llm.generate([5], asks(choice=["yes"]))).text == "yes" and llm.engine.loaded.model is model


# ------------------------------------------------------------------------------------------- third parties' parts


class Blind(Scheduler):
    """A scheduler that knows no constraints."""

    caps = Capabilities()


class Held(Words):
    """Compiles when it is told to, and what it is told to fail fails."""

    go = threading.Event()

    def compile(self, spec):
        if "fails" in spec.text:
            raise MemoryError("too many words")
        if "held" in spec.text:
            self.go.wait(60)
        return super().compile(spec)


class Lying(WordsMatcher):
    def accept(self, token_ids):
        return False


class Blank(WordsMatcher):
    def fill(self, row):
        row[:] = 0
        raise RuntimeError("no mask")


class Liar(Words):
    def compile(self, spec):
        made = super().compile(spec)
        if "lie" in spec.text:
            made.matcher = lambda: Lying(self, made.texts, [])
        elif "blank" in spec.text:
            made.matcher = lambda: Blank(self, made.texts, [])
        return made


PARTS = [
    ComponentSpec("grammar", "held", f"{__name__}:Held"),
    ComponentSpec("grammar", "liar", f"{__name__}:Liar"),
    ComponentSpec("scheduler", "blind", f"{__name__}:Blind"),
    ComponentSpec("grammar", "absent", "no_such_module:Grammar", probe=f"{__name__}:is_absent", priority=99),
]


def is_absent():
    return "the module 'no_such_module' is not installed"


@pytest.fixture
def engine(folder, steps):
    plugins = Registry.load()
    plugins._announce("words", "acme", "1.0", PARTS)
    made = []

    def build(name, scheduler="default"):
        config = Config(
            model=ModelConfig(path=folder),
            engine=EngineOptions(dtype="float32", max_model_len=96, async_scheduling=steps.endswith("true")),
            kv_cache=KVCacheConfig(num_blocks=96),
            scheduler=SchedulerConfig(name=scheduler, max_num_seqs=8),
            grammar=GrammarConfig(name),
        )
        made.append(build_engine(config, plugins))
        return made[-1]

    yield build
    for one in made:
        one.close()


def finished(engine):
    """{request id: its output} once everything has ended."""
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return {o.request_id: o for o in outputs}


def test_request_waits_for_its_grammar_and_holds_nobody_up(engine):
    Held.go.clear()
    one = engine("held")
    one.add_request("held", [5], asks(choice=["held"]))
    one.add_request("ready", [5], asks(choice=["yes"]))
    one.add_request("free", [5], SamplingParams(max_tokens=4))
    ended = []
    while len(ended) < 2:
        ended += [o.request_id for o in one.step()]
    assert set(ended) == {"ready", "free"}
    assert one.step() == []
    Held.go.set()
    assert finished(one)["held"].outputs[0].text == "held"


def test_waiting_request_can_be_aborted_and_the_engine_closed(engine):
    Held.go.clear()
    one = engine("held")
    one.add_request("a", [5], asks(choice=["held"]))
    one.add_request("b", [5], asks(choice=["held"]))
    one.step()
    assert one.abort("a").outputs[0].finish_reason == "abort"
    one.close()
    Held.go.set()


def test_compilation_that_fails_ends_its_request_alone(engine):
    one = engine("held")
    one.add_request("bad", [5], asks(choice=["fails"], n=2))
    one.add_request("good", [5], asks(choice=["yes"]))
    outputs = finished(one)
    assert [c.finish_reason for c in outputs["bad"].outputs] == ["error", "error"]
    assert outputs["bad"].error == (
        "grammar 'held' of acme, structured_outputs.choice, raised in compile: MemoryError: too many words"
    )
    assert outputs["good"].outputs[0].text == "yes"


def test_matcher_that_refuses_what_its_mask_allows_ends_its_request_alone(engine):
    one = engine("liar")
    one.add_request("bad", [5], asks(choice=["lie"]))
    one.add_request("good", [5], asks(choice=["yes"]))
    outputs = finished(one)
    assert "grammar 'liar' of acme, structured_outputs.choice, refuses token" in outputs["bad"].error
    assert outputs["bad"].outputs[0].token_ids == [] and outputs["good"].outputs[0].text == "yes"


def test_mask_that_fails_ends_its_request_with_an_error_also_when_an_eos_is_drawn(engine):
    one = engine("liar")
    one.add_request("bad", [5], asks(choice=["blank"], logit_bias={END: 100.0}))
    one.add_request("good", [5], asks(choice=["yes"]))
    outputs = finished(one)
    assert (
        outputs["bad"].outputs[0].finish_reason == "error"
        and "raised in fill: RuntimeError: no mask" in outputs["bad"].error
    )
    assert outputs["good"].outputs[0].text == "yes"


def test_scheduler_that_serves_no_grammars_is_named(engine):
    one = engine("held", scheduler="blind")
    with pytest.raises(RequestError, match="scheduler=blind does not serve grammars"):
        one.add_request("a", [5], asks(choice=["yes"]))
    one.add_request("free", [5], SamplingParams(max_tokens=2))
    assert finished(one)["free"].outputs[0].finish_reason


def test_auto_passes_over_what_is_not_installed_and_a_name_does_not(engine):
    one = engine("auto")
    one.add_request("a", [5], asks(choice=["yes"]))
    assert finished(one)["a"].outputs[0].text == "yes"
    with pytest.raises(PluginError, match="grammar=absent cannot be used here: the module 'no_such_module'"):
        engine("absent")


def test_engine_without_any_grammar_refuses_with_what_to_install(folder, monkeypatch):
    reason = "the module 'x' is not installed. Install it with: pip install 'framework[grammar]'"
    for name in ("xgrammar", "llguidance"):
        monkeypatch.setattr(f"framework_grammars.probes.{name}", lambda: reason)
    plugins = Registry.load()
    engine = build_engine(Config(model=ModelConfig(path=folder), kv_cache=KVCacheConfig(num_blocks=9),
                                 engine=EngineOptions(max_model_len=96)), plugins)  # fmt: skip
    with pytest.raises(RequestError, match=r"structured_outputs\.regex cannot be served: grammar=auto: .*pip install"):
        engine.add_request("a", [5], asks(regex="a"))
    engine.close()
