"""`run=replay` does what was recorded, whatever happened then, and names a planted difference exactly."""

import json
from dataclasses import asdict, dataclass
from typing import ClassVar

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from framework import LLM, SamplingParams
from framework.batch import Field
from framework.config import Config, compose
from framework.errors import ConfigError
from framework.interfaces import StageSpec
from framework.plugins import ComponentSpec, registry
from framework.runs import Incomplete, RunArgs
from framework.runs.replay import run
from framework.testing.crafted import save_crafted

SMALL = ("engine.dtype=float32", "engine.max_model_len=64", "scheduler.max_num_seqs=4", "kv_cache.block_size=4")
PROMPTS = ([4, 5, 6, 7, 8, 9, 10], [8, 9, 10, 11], [4, 5, 6, 7, 9])
RANDOM = SamplingParams(temperature=0.9, top_k=9, seed=5, max_tokens=8, ignore_eos=True)
PLAIN = SamplingParams(seed=5, max_tokens=8, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Any of 24 tokens may follow on any other; token t is the word wt."""
    table = 2.0 * torch.randn(24, 24, generator=torch.Generator().manual_seed(0))
    folder = save_crafted(tmp_path_factory.mktemp("replay") / "m", table, eos_token_id=3)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(24)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def record(folder, tmp_path):
    """Writes a trace of what `work(llm)` does; returns its path."""

    def make(work, *words, stages=True, model=None):
        path = tmp_path / "t.jsonl"
        told = f"engine.trace_stages={str(stages).lower()}"
        with LLM(model or folder, overrides=[*SMALL, f"trace={path}", told, *words]) as llm:
            work(llm)
        return path

    return make


@pytest.fixture
def replay(capsys):
    """Runs the replay: (figures, the report as JSON)."""

    def call(path, *words, **options):
        typed = {word.lstrip("+~").partition("=")[0]: word for word in words}
        args = RunArgs(typed=typed, options={"json": True, **options})
        try:
            figures = run(compose([*words, f"trace={path}"]) if words else Config(trace=str(path)), args)
        except Incomplete as part:
            figures = part.metrics
        return figures, json.loads(capsys.readouterr().out)

    return call


def generate(params):
    def work(llm):
        llm.generate([*PROMPTS], params)

    return work


def twice(llm):
    """Completions, greedy rows, early ends, and prefixes that the second round finds."""
    params = [RANDOM.replace(n=2, presence_penalty=0.5), GREEDY, PLAIN.replace(ignore_eos=False, top_p=0.8)]
    for _ in range(2):
        llm.generate([*PROMPTS], params)


def with_aborts(llm):
    engine = llm.engine
    for name, prompt in zip("abc", PROMPTS, strict=True):
        engine.add_request(name, prompt, RANDOM)
    for step in range(3):
        engine.step()
        engine.abort("abc"[step])
        engine.add_request(f"{step}", PROMPTS[step], PLAIN)
    while engine.has_unfinished_requests():
        engine.step()


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def first_with(path, request, at=0):
    """(step, line) in which the request draws its token number `at`."""
    found = [(x["step"], n) for n, x in enumerate(lines_of(path), start=1) if request in x.get("tokens", ())]
    return found[at]


def where(report):
    first = report["first"]
    return (first["step"], first["line"]), first["request"], first["stage"]


# ------------------------------------------------------------------------------------------------------- equality


@pytest.mark.parametrize("stages", [True, False], ids=["stages", "tokens"])
@pytest.mark.parametrize(
    "words",
    [
        (),
        ("scheduler.max_num_batched_tokens=6", "kv_cache.num_blocks=9"),
        ("engine.async_scheduling=true", "kv_cache.num_blocks=9"),
        ("scheduler.preemption=swap", "kv_cache.num_blocks=9"),
    ],
    ids=["plain", "chunks and a small pool", "async", "swap"],
)
def test_unchanged_trace_is_equal(record, replay, words, stages):
    path = record(twice, *words, stages=stages)
    lines = lines_of(path)
    happened = {key: any(x.get(key) for x in lines) for key in ("preempted", "moves")}
    assert happened["preempted"] == bool(words) and (happened["moves"] or "swap" not in str(words))
    assert any(admitted["hit_tokens"] for x in lines for admitted in x.get("admitted", ()))
    figures, report = replay(path)
    assert (report["unlike"], report["first"], report["config"]) == (0, None, [])
    assert figures["tokens"] == sum(len(x["tokens"]) for x in lines if "step" in x)
    assert figures["requests"] == 8 and figures["steps"] == sum("step" in x for x in lines)


@pytest.mark.parametrize("ahead", ["true", "false"])
def test_trace_with_aborts_is_equal(record, replay, ahead):
    path = record(with_aborts, f"engine.async_scheduling={ahead}")
    assert sum("end" in x for x in lines_of(path)) == 3
    assert replay(path)[1]["first"] is None


def test_request_with_a_grammar_is_equal_and_another_mask_is_named(record, replay, talker):
    pytest.importorskip("xgrammar")
    wanted = RANDOM.replace(structured_outputs={"choice": ["yes", "now"]}, ignore_eos=False)
    path = record(generate([wanted, RANDOM, GREEDY]), stages=False, model=talker)
    assert any(x.get("grammar") for x in lines_of(path))
    assert replay(path)[1]["first"] is None
    planted(path, {"request": "0"}, params=lambda p: {**p, "structured_outputs": {"choice": ["yes", "now", "why"]}})
    assert where(replay(path)[1]) == (first_with(path, "0"), "0", "grammar mask")


def test_masks_and_penalties_of_requests_are_equal(record, replay):
    each = [
        RANDOM.replace(logit_bias={4: -3.5}, repetition_penalty=1.3, stop_token_ids=[9]),
        RANDOM.replace(bad_words=["w5 w6"], min_tokens=3, allowed_token_ids=[4, 5, 6, 7, 8, 9, 3], ignore_eos=False),
        RANDOM.replace(logprobs=2, prompt_logprobs=1, extra_args={"no_repeat_ngram": {"size": 2}}),
    ]
    assert replay(record(generate(each)))[1]["first"] is None


# ----------------------------------------------------------------------------------------------------- differences


def planted(path, matching, **changes):
    """Changes fields of the first line that has these values."""
    lines = lines_of(path)
    line = next(x for x in lines if all(x.get(key) == value for key, value in matching.items()))
    line.update({key: change(line[key]) for key, change in changes.items()})
    path.write_text("".join(json.dumps(x) + "\n" for x in lines))


@pytest.mark.parametrize("stages", [True, False], ids=["stages", "tokens"])
def test_other_seed_of_one_request_is_named(record, replay, stages):
    path = record(generate([GREEDY, PLAIN.replace(temperature=5.0), PLAIN]), stages=stages)
    planted(path, {"request": "1"}, seed=lambda seed: seed + 1)
    _, report = replay(path)
    if stages:
        assert where(report) == (first_with(path, "1"), "1", "seed")
    else:  # the parameters of the line say another seed than the line
        assert where(report)[1:] == ("1", "seed")
    assert {one["request"] for one in [report["first"], *report["others"]]} == {"1"}


def test_other_seed_by_a_word_is_named_where_tokens_alone_were_recorded(record, replay):
    path = record(generate([GREEDY, PLAIN.replace(temperature=9.0, seed=None), GREEDY]), "engine.seed=1", stages=False)
    _, report = replay(path, "engine.seed=2")
    assert (report["first"]["request"], report["first"]["stage"]) == ("1", "seed")
    assert report["config"] == ["engine.seed is 2, and was 1"]
    assert replay(path, "engine.seed=1")[1]["first"] is None


@pytest.mark.parametrize("stages", [True, False], ids=["stages", "tokens"])
def test_other_sampler_is_named(record, replay, stages):
    path = record(generate([GREEDY, PLAIN, PLAIN]), stages=stages)
    _, report = replay(path, "sampler=greedy")
    greedy = [max(range(24), key=row.__getitem__) for row in torch_table()]
    expected = next(
        (x["step"], n, name)
        for n, x in enumerate(lines_of(path), start=1)
        for name in sorted(x.get("tokens", ()))
        if name != "0" and (stages or x["tokens"][name] != [greedy[before(path, name, x["step"])]])
    )
    assert (*where(report)[0], where(report)[1]) == expected
    assert report["first"]["stage"] == "greedy"
    assert "sampler is greedy, and was gumbel" in report["config"]
    assert {one["request"] for one in report["others"]} <= {"1", "2"}


def torch_table():
    return (2.0 * torch.randn(24, 24, generator=torch.Generator().manual_seed(0))).tolist()


def before(path, name, step):
    """The token before the one that the request draws in a step."""
    drawn = [x["tokens"][name][0] for x in lines_of(path) if name in x.get("tokens", ()) and x["step"] < step]
    return drawn[-1] if drawn else PROMPTS[int(name)][-1]


@pytest.mark.parametrize("stages", [True, False], ids=["stages", "tokens"])
def test_stage_that_is_gone_is_named(record, replay, stages):
    path = record(generate([GREEDY, PLAIN.replace(top_k=2, temperature=3.0), PLAIN]), stages=stages)
    _, report = replay(path, "~sampler.stages.top_k")
    assert (report["first"]["request"], report["first"]["stage"]) == ("1", "top_k")
    assert not stages or where(report)[0] == first_with(path, "1")
    assert report["config"] == ["sampler.stages: top_k is gone"] and not report["others"]


@dataclass(frozen=True)
class TiltConfig:
    strength: float = 0.0
    token: int = 4


class Tilt:
    """A third party's stage: a bias of one token, for requests that draw."""

    spec: ClassVar[StageSpec] = StageSpec("tilt", kind="elementwise", fields=(Field("is_on", "bool"),))

    def __init__(self, config, ctx):
        self._config, self._is_on = config, ctx.column("is_on")

    def wants(self, params):
        return params.temperature == 1.0

    def validate(self, params):
        pass

    def add_request(self, req_idx, params, request):
        self._is_on.np[req_idx] = True

    def commit(self, rows, sampled, num_valid):
        pass

    def on(self, rows):
        return self._is_on.dev[rows.req_idx].unsqueeze(1)

    def apply(self, logits, rows):
        logits[:, self._config.token : self._config.token + 1] += self._config.strength * self.on(rows)


@pytest.fixture
def tilt(monkeypatch, tmp_path):
    spec = ComponentSpec("stage", "tilt", f"{__name__}:Tilt", config=f"{__name__}:TiltConfig")
    monkeypatch.setitem(registry()._specs, ("stage", "tilt"), spec)
    return Tilt


def tilt_by(strength):
    return f"+sampler.stages.tilt={{name: tilt, order: 550, strength: {strength}}}"


@pytest.mark.parametrize("stages", [True, False], ids=["stages", "tokens"])
def test_stage_with_another_option_is_named(record, replay, tilt, stages):
    path = record(generate([GREEDY, PLAIN, RANDOM]), tilt_by(2.0), stages=stages)
    assert replay(path)[1]["first"] is None
    _, report = replay(path, tilt_by(40.0))
    assert where(report)[1:] == ("1", "tilt")
    assert report["config"] == ["sampler.stages: tilt has strength=40.0, token=4, and had strength=2.0, token=4"]


@pytest.mark.parametrize("stages", [True, False], ids=["stages", "tokens"])
def test_stage_that_is_new_is_named(record, replay, tilt, stages):
    path = record(generate([GREEDY, PLAIN, RANDOM]), stages=stages)
    _, report = replay(path, tilt_by(40.0))
    assert (where(report)[1:], report["config"]) == (("1", "tilt"), ["sampler.stages: tilt is new"])
    step, line, token = next(
        (x["step"], n, x["tokens"]["1"])
        for n, x in enumerate(lines_of(path), start=1)
        if "1" in x.get("tokens", ()) and (stages or x["tokens"]["1"] != [4])
    )
    assert where(report)[0] == (step, line) and [report["first"]["recorded"]] == token and report["first"]["now"] == 4


def test_stage_whose_code_has_changed_is_named_where_stages_were_recorded(record, replay, tilt, monkeypatch):
    path = record(generate([GREEDY, PLAIN, RANDOM]), tilt_by(2.0))
    monkeypatch.setattr(tilt, "apply", lambda self, logits, rows: logits.mul_(1.0 + self.on(rows)))
    _, report = replay(path)
    assert where(report) == (first_with(path, "1"), "1", "tilt")
    assert report["config"] == []
    assert {one["stage"] for one in report["others"]} == set()


def test_stage_whose_code_has_changed_is_found_and_not_guessed_where_tokens_alone_were(
    record, replay, tilt, monkeypatch
):
    path = record(generate([GREEDY, PLAIN, RANDOM]), tilt_by(2.0), stages=False)
    monkeypatch.setattr(tilt, "apply", lambda self, logits, rows: logits.mul_(1.0 - 3.0 * self.on(rows)))
    _, report = replay(path)
    assert where(report)[1:] == ("1", None)
    assert "engine.trace_stages=true" in report["first"]["how"]


def forbid_beyond_4(self, logits, rows):
    logits[:, 5:].masked_fill_(self.on(rows), -torch.inf)


def test_stage_that_forbids_the_recorded_token_now_is_named_by_tokens_alone(record, replay, tilt, monkeypatch):
    path = record(generate([GREEDY, PLAIN, RANDOM]), tilt_by(2.0), stages=False)
    monkeypatch.setattr(tilt, "apply", forbid_beyond_4)
    _, report = replay(path)
    assert where(report)[1:] == ("1", "tilt") and report["first"]["recorded"] >= 5 > report["first"]["now"]
    assert "forbids" in report["first"]["how"]


def out_of_tilt(self, logits, rows):
    raise RuntimeError("out of tilt")


def test_stage_that_raises_is_named_and_ends_the_replay(record, replay, tilt, monkeypatch):
    path = record(generate([GREEDY, PLAIN, RANDOM]), tilt_by(2.0))
    monkeypatch.setattr(tilt, "apply", out_of_tilt)
    _, report = replay(path)
    assert report["first"]["stage"] == "tilt" and "out of tilt" in report["broken"]
    assert report["steps"] == 0


def test_later_steps_go_on_from_the_recorded_tokens(record, replay):
    """A row whose token differs once is compared in every later step, and differs no more."""
    path = record(generate([GREEDY, PLAIN.replace(presence_penalty=1.0), PLAIN]), stages=False)
    step, line = first_with(path, "1", at=2)
    lines = lines_of(path)
    lines[line - 1]["tokens"]["1"] = [(lines[line - 1]["tokens"]["1"][0] + 1) % 24]
    path.write_text("".join(json.dumps(x) + "\n" for x in lines))
    figures, report = replay(path)
    assert where(report)[:2] == ((step, line), "1") and figures["tokens"] == 24
    told = [x["tokens"]["1"] for x in lines if "1" in x.get("tokens", ())]
    assert len(told) == 8 and report["unlike_tokens"] < 7, "the draw behind the planted token may differ, the rest not"


def test_same_words_as_recorded_change_nothing(record, replay):
    path = record(generate([GREEDY, PLAIN, RANDOM]), "sampler.stages.top_k.order=1050")
    assert replay(path)[1]["first"] is None
    _, report = replay(path, "sampler=gumbel", compare="tokens")
    assert report["compared"] == "tokens"
    assert any("the order is" in line for line in report["config"])


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("scheduler.max_num_seqs=2", "scheduler.max_num_seqs=2 means nothing to run=replay; the schedule is"),
        ("kv_cache.block_size=8", "kv_cache.block_size=8 means nothing to run=replay; the schedule is"),
        ("policy=shortest", "policy=shortest means nothing to run=replay"),
        ("engine.async_scheduling=true", "engine.async_scheduling=true means nothing to run=replay; steps are"),
        ("engine.trace_prompts=false", "engine.trace_prompts=false means nothing to run=replay"),
        ("prompt=Hi", "prompt=Hi means nothing to run=replay; what runs stands in the trace"),
        ("bench.seed=3", "bench.seed=3 means nothing to run=replay"),
    ],
)
def test_word_that_a_replay_cannot_follow_is_refused(tmp_path, word, message):
    path = tmp_path / "t.jsonl"
    path.write_text(HEADER)
    key, _, value = word.partition("=")
    texts = {"prompt": value} if key == "prompt" else {}
    with pytest.raises(ConfigError, match=message):
        run(Config(trace=str(path)), RunArgs(typed={key: word}, **texts))


def _header():
    return json.dumps({"trace": 2, "time": 0.0, "max_model_len": 64, "max_num_batched_tokens": 64, "num_blocks": 9,
                       "block_size": 4, "num_swap_blocks": 0, "config": asdict(Config())}) + "\n"  # fmt: skip


HEADER = _header()
REQUEST = '{"request": "0", "t": 0.0, "num_prompt_tokens": 1, "params": {}, "named": []}\n'
STEP = json.dumps({"step": 0, "t": 0, "rows": [["7", 0, 1, 0, True]], "admitted": [], "preempted": [], "aborted": [],
                   "tokens": {}, "finished": {}, "counts": {}, "seconds": {}, "left": [], "only_decodes": False,
                   "goes_on": False, "prompt_tokens": 0, "blocks": []}) + "\n"  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1 is missing, the file is empty"),
        ("steps\n", r"line 1 is not JSON \(Expecting value"),
        ('{"id": 1, "text": "Hi"}\n', "line 1 is not the first line of a trace"),
        ('{"trace": 9, "time": 0}\n', "line 1 says format 9, and this version reads 1 to 2"),
        ('{"trace": 1, "time": 0}\n', "line 1 says format 1, which holds too little for a replay. Record it again"),
        ('{"trace": 2, "time": 0, "config": null}\n', "line 1 holds no configuration"),
        ('{"trace": 2, "time": 0, "config": {"engine": {"speed": 3}}}\n', "line 1 holds a configuration that cannot"),
        (HEADER + "[1, 2]\n", "line 2 is none of request, step, end"),
        (HEADER + HEADER, "line 2 is none of request, step, end"),
        (HEADER + '{"step": 0}\n', "line 2 lacks t, rows"),
        (HEADER + REQUEST, "line 2 has no prompt_token_ids: recorded with engine.trace_prompts=false"),
        (HEADER + STEP, "line 2 names request '7', of which no earlier line tells"),
        (HEADER + STEP.replace('["7", 0, 1, 0, true]', "7"), "line 2 cannot be read: TypeError"),
        (HEADER + STEP[:40], "line 2 is cut off. Delete it"),
        (HEADER + "\n" + STEP, "line 2 is not JSON"),
        (HEADER + REQUEST.replace("{}", "null"), "line 2 has parameters that JSON cannot hold"),
    ],
    ids=lambda value: None,
)
def test_file_that_is_no_whole_trace_is_refused_with_its_line(tmp_path, text, message):
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"trace=.*t\.jsonl: {message}"):
        run(Config(trace=str(path)), RunArgs())


def test_what_cannot_be_replayed_is_refused_by_name(record, tmp_path):
    with pytest.raises(ConfigError, match=r"run=replay needs a trace to execute\. Name one: trace=FILE"):
        run(Config(), RunArgs())
    with pytest.raises(ConfigError, match=r"trace=.*nowhere\.jsonl: No such file or directory"):
        run(Config(trace=f"{tmp_path}/nowhere.jsonl"), RunArgs())
    path = record(generate([GREEDY] * 3), stages=False)
    with pytest.raises(ConfigError, match=r"run.compare=stages: trace=.* holds tokens alone. Record with engine.trace"):
        run(Config(trace=str(path)), RunArgs(options={"compare": "stages"}))
    with pytest.raises(ConfigError, match=r"run\.compare=text: there is no such choice"):
        run(Config(trace=str(path)), RunArgs(options={"compare": "text"}))
    planted(path, {"trace": 2}, config=lambda config: {**config, "kv_connector": {"name": "faulty", "options": {}}})
    with pytest.raises(ConfigError, match="recorded with kv_connector=faulty, and no trace holds what a connector"):
        run(Config(trace=str(path)), RunArgs())


def test_trace_without_prompts_holds_none_and_is_refused(record):
    path = record(generate([GREEDY] * 3), "engine.trace_prompts=false")
    assert "prompt_token_ids" not in path.read_text()
    with pytest.raises(ConfigError, match=r"line 2 has no prompt_token_ids: recorded with engine\.trace_prompts=false"):
        run(Config(trace=str(path)), RunArgs())


def test_stages_need_a_trace(folder):
    with pytest.raises(ConfigError, match=r"engine.trace_stages=true needs a trace that it can write into"):
        LLM(folder, overrides=[*SMALL, "engine.trace_stages=true"])


def test_report_says_what_differs_in_a_few_lines(record, capsys):
    path = record(generate([GREEDY, PLAIN, PLAIN]))
    run(Config(trace=str(path)), RunArgs())
    assert capsys.readouterr().out.endswith("compared\nequal: every row did what was recorded\n")
    with pytest.raises(Incomplete, match="the replay differs from"):
        run(compose([f"trace={path}", "sampler=greedy"]), RunArgs(typed={"sampler": "sampler=greedy"}))
    out = capsys.readouterr().out
    step, line = first_with(path, "1")
    assert f"first difference: step {step} (line {line}), request 1, stage greedy\n" in out
    assert "it picks the token, in the place of gumbel" in out


def test_report_tells_of_another_configuration_that_made_no_difference(record, capsys):
    path = record(generate([GREEDY] * 3))
    word = "sampler.top_k=5"
    run(compose([f"trace={path}", word]), RunArgs(typed={"sampler.top_k": word}))
    out = capsys.readouterr().out
    assert "equal: every row did what was recorded\n" in out
    assert out.endswith("the configuration differs:\n  sampler.top_k is 5 for all requests\n")
