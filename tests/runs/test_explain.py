"""`run=explain`: who set which value, what was chosen by itself and why, the pipeline; no weight is read."""

import json

import pytest

SMALL = ("engine.max_model_len=64", "engine.dtype=float32")


@pytest.fixture
def explained(talker, typed_here):
    """Runs `explain WORDS` in this process: (exit code, stdout, stderr)."""
    return lambda *words: typed_here("explain", f"model.path={talker}", *words)


@pytest.fixture
def report(explained):
    def run(*words):
        code, out, err = explained("run.json=true", *words)
        assert code == 0, err
        return json.loads(out)

    return run


def by_key(entries):
    return {entry["key"]: entry for entry in entries}


def test_each_value_names_who_set_it(report):
    found = by_key(report("policy=priority", "engine.seed=3", "sampler.logit_bias={}")["settings"])

    def of(key):
        return tuple(found[key][name] for name in ("value", "source", "where"))

    assert of("engine.graphs") == ("auto", "default", "conf/config.yaml")
    assert of("scheduler.max_num_seqs") == (256, "group file", "conf/scheduler/default.yaml")
    assert of("policy.name") == ("priority", "group file", "conf/policy/priority.yaml, chosen by policy=priority")
    assert of("engine.seed") == (3, "command line", "engine.seed=3")
    assert not {key for key in found if key.startswith(("run", "bench", "hydra"))}


def test_values_are_those_that_the_engine_gets(report):
    from framework.config import compose

    found = by_key(report("kv_cache.block_size=8", "+sampler=greedy", "engine.seed=7")["settings"])
    config = compose(["kv_cache.block_size=8", "+sampler=greedy", "engine.seed=7"])
    for node in ("engine", "kv_cache", "scheduler"):
        for name in vars(getattr(config, node)):
            if name != "options":
                assert found[f"{node}.{name}"]["value"] == getattr(getattr(config, node), name), name
    assert found["sampler.name"]["value"] == config.sampler.name


def test_file_of_ones_own_is_named(report, tmp_path):
    (tmp_path / "mine" / "policy").mkdir(parents=True)
    (tmp_path / "mine" / "policy" / "own.yaml").write_text("name: shortest\n")
    found = by_key(report("--config-dir=mine", "policy=own")["settings"])
    assert found["policy.name"] == {
        "key": "policy.name", "value": "shortest", "source": "file",
        "where": "mine/policy/own.yaml, chosen by policy=own",
    }  # fmt: skip


def test_words_win_over_what_they_replace(report):
    found = by_key(report("sampler.stages.top_k=null", "+sampler.stages.min_p.after=top_p")["settings"])
    assert not [key for key in found if key.startswith("sampler.stages.top_k")]
    assert found["sampler.stages.min_p.after"]["source"] == "command line"


def test_pipeline_stands_in_its_order_with_the_reason_of_each_place(report):
    stages = report("sampler.stages.top_k=null", "sampler.stages.min_p.order=null", "+sampler.stages.min_p.after=top_p")
    found = [(s["key"], s["kind"]) for s in stages["pipeline"]]
    assert found[-4:] == [
        ("temperature", "elementwise"), ("top_p", "threshold"), ("min_p", "threshold"), ("gumbel", "select"),
    ]  # fmt: skip
    needs = {s["key"]: (s["needs"], "argmax" in s["keeps"], "drafts" in s["keeps"]) for s in stages["pipeline"]}
    assert needs["min_p"] == ([], True, True) and needs["gumbel"] == ([], False, True)
    places = {s["key"]: s["place"] for s in stages["pipeline"]}
    assert places["min_p"] == "after top_p (sampler.stages.min_p.after=top_p)"
    assert places["top_p"] == "order 1000 (conf/sampler/stage/top_p.yaml)"


def test_what_was_left_open_has_a_reason_and_what_was_said_has_none(report):
    found = by_key(report()["automatic"])
    assert found["engine.max_model_len"]["value"] == 256
    assert "max_position_embeddings" in found["engine.max_model_len"]["why"]
    assert (found["model"]["value"], found["backend"]["value"]) == ("llama", "cpu")
    assert "architecture" in found["model"]["why"] and "only one" in found["backend"]["why"]
    assert found["engine.dtype"]["value"] in ("float32", "bfloat16") and found["threads"]["value"] >= 1
    said = by_key(report(*SMALL, "backend=cpu", "kv_cache.num_blocks=9")["automatic"])
    assert not {"engine.max_model_len", "engine.dtype", "backend", "kv_cache.num_blocks"} & set(said)


def test_attention_that_does_not_serve_the_models_layers_is_told(report):
    entry = by_key(report()["automatic"])["attention"]
    assert entry["value"] == "cpu"
    assert "mla_torch: it does not serve layers that are not latent, which the model has" in entry["why"]


def test_groups_of_a_built_engine_are_told(report):
    entry = by_key(report("run.build=true", "kv_cache.num_blocks=9")["built"])["KV groups"]
    assert (entry["value"], entry["why"]) == (1, "full: 1 layer, full")


def test_no_weight_is_read_unless_the_engine_is_asked_for(report, monkeypatch):
    from framework_loaders.safetensors import SafetensorsLoader

    def refuse(*args, **kwargs):
        raise AssertionError("weights were opened")

    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsLoader, "open", refuse)
        without = report(*SMALL)
    assert (without["built"], without["known_once_built"][0]) == ([], "kv_cache.num_blocks")
    built = report(*SMALL, "run.build=true", "kv_cache.num_blocks=9")
    assert by_key(built["built"])["kv_cache.num_blocks"]["value"] == 9
    assert built["known_once_built"] == []


def test_tables_are_for_people_and_fold_what_nobody_set(explained):
    code, out, _ = explained("engine.seed=3")
    assert code == 0
    assert "  engine.seed " in out and "command line  engine.seed=3" in out
    assert "null in conf/config.yaml: engine.max_model_len" in out
    assert "Known once the engine is built, with run.build=true" in out
    assert "\x1b[" not in out  # no terminal, no colours
    headings = ["Values and who set them", "Chosen automatically", "Sampler pipeline"]
    assert [line for line in out.splitlines() if line.startswith(tuple(headings))][0:1] == headings[0:1]


def test_conflict_is_an_error_beside_the_values_that_made_it(explained):
    code, out, err = explained("engine.max_model_len=999")
    assert code == 2
    assert "engine.max_model_len=999\n" in out
    assert "error: engine.max_model_len=999 is more than the 256 positions" in err


@pytest.mark.parametrize(("word", "message"), [
    ("output=o", "output=o means nothing to run=explain"),
    ("run.jsn=true", "run.jsn: there is no such key. Did you mean 'json'?"),
    ("run.json=maybe", "run.json: Value 'maybe'"),
])  # fmt: skip
def test_what_explain_does_not_know_is_refused(explained, word, message):
    code, _, err = explained(word)
    assert code == 2 and message in err


def test_capabilities_of_the_stages_are_shown_when_asked_for(explained):
    code, out, _ = explained("run.capabilities=true", "sampler=mirostat", *SMALL)
    table = out.partition("What the stages need and keep\n")[2].splitlines()
    rows = {line.split()[0]: line for line in table[1:] if line.startswith("  ")}
    assert (
        code == 0 and "tau, eta" in rows["mirostat"] and "drafts" in rows["mirostat"].split("-", 1)[1].split("async")[0]
    )
    assert "What the stages need" not in explained(*SMALL)[1]
