"""`run=generate` that is broken off keeps what was made, and several completions have a line each."""

import json
import os
import signal

import pytest

SMALL = ("engine.dtype=float32", "engine.max_model_len=200", "scheduler.max_num_seqs=2", "kv_cache.num_blocks=64")
GREEDY = ("sampler.temperature=0", "sampler.ignore_eos=true")


@pytest.fixture
def generated(talker, typed_here):
    """Runs `generate WORDS` in this process: (exit code, stdout, stderr)."""
    return lambda *words: typed_here("generate", f"model.path={talker}", *SMALL, *GREEDY, *words)


@pytest.fixture
def signal_in_step(monkeypatch):
    """Sends a signal to this process in the n-th step of an engine."""
    from framework.engine.core import EngineCore

    def send(number, step):
        steps, whole = [], EngineCore.step

        def counted(self):
            steps.append(step)
            if len(steps) == step:
                os.kill(os.getpid(), number)
            return whole(self)

        monkeypatch.setattr(EngineCore, "step", counted)

    return send


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_that_is_broken_off_keeps_what_was_made(generated, signal_in_step, tmp_path, number):
    lines = [{"prompt": "a\n", "max_tokens": 2, "id": "short"}, {"prompt": "b\n", "id": "long"}, {"prompt": "c\n"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    signal_in_step(number, step=3)
    code, out, err = generated("prompts_file=in.jsonl", "output=out.jsonl", "sampler.max_tokens=50")
    assert (code, out) == (128 + number, "")
    found = {line["id"]: line for line in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert found["short"]["finish_reason"] == "length"
    assert found["long"]["finish_reason"] == "abort" and len(found["long"]["token_ids"]) == 3
    assert "Traceback" not in err and err.splitlines()[-1] == "interrupted"


def test_texts_that_were_printed_in_part_are_printed_when_the_run_is_broken_off(generated, signal_in_step, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a\\n"}\n{"prompt": "b\\n"}\n{"prompt": "c\\n"}\n')
    signal_in_step(signal.SIGTERM, step=5)
    code, out, _ = generated("prompts_file=in.jsonl", "sampler.max_tokens=50")
    assert (code, out[:4]) == (143, "a\nAé")
    assert "b\nAé" in out and "c\n" not in out  # the third had no row yet


def test_every_completion_of_a_prompt_has_its_line_and_its_text(generated, tmp_path):
    code, out, _ = generated("prompt=a\n", "sampler.n=2", "sampler.max_tokens=3", "output=out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(line["id"], line["index"], line["text"]) for line in lines] == [("1", 0, "Aé"), ("1", 1, "Aé")]
    code, out, _ = generated("prompt=a\n", "sampler.n=2", "sampler.max_tokens=3")
    assert (code, out) == (0, "a\nAé\n\n" * 2)


def test_prompt_logprobs_that_were_asked_for_reach_the_output(generated, tmp_path):
    code, _, err = generated("prompt=a\n", "sampler.prompt_logprobs=0", "sampler.max_tokens=1", "output=out.jsonl")
    assert code == 0, err
    first, second = json.loads((tmp_path / "out.jsonl").read_text())["prompt_logprobs"]
    assert first is None and len(second) == 1
