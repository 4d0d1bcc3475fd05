"""Ctrl-C and SIGTERM at each phase of a run: the exit code of the signal, no trace, and what was made is kept."""

import io
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from framework.cli import main
from framework.testing.crafted import save_crafted

SMALL = ("engine.dtype=float32", "engine.max_model_len=64", "kv_cache.num_blocks=64", "scheduler.max_num_seqs=2")
PHASES = {
    "composing": "framework.composing.parts_of",
    "choosing": "framework.engine.build.choose",
    "loading": "framework_loaders.safetensors.SafetensorsSource.take",
    "building": "framework.engine.build._assemble",
    "running": "framework.engine.core.EngineCore.step",
    "closing": "framework.engine.engine.Engine.close",
}
RUNS = {
    "generate": ["generate", "prompts_file=in.jsonl", "output=out.jsonl", "sampler.temperature=0"],
    "chat": ["chat", "sampler.max_tokens=4"],
    "bench": ["bench", "bench.num_prompts=2", "bench.input_len=4", "bench.output_len=4", "run.rounds=1", "run.warmup=0",
              "output=report.json"],
}  # fmt: skip
LINES = [{"prompt": "w4", "max_tokens": 2}, {"prompt": "w5", "max_tokens": 9}, {"prompt": "w6", "max_tokens": 9}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Greedy goes from t to t + 1; no token ends a request."""
    folder = save_crafted(tmp_path_factory.mktemp("signals") / "model", torch.eye(24).roll(1, 1) * 8)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(24)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.fixture
def sent(folder, tmp_path, monkeypatch, capsys, quiet_logging):
    """Runs a command line that sends itself a signal at the n-th call of a function: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("w4\n"))
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))

    def run(words, number, place, at_call=1):
        calls, whole = [], _resolve(place)

        def signalling(*args, **kwargs):
            calls.append(1)
            if len(calls) == at_call:
                os.kill(os.getpid(), number)
            return whole(*args, **kwargs)

        handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
        with monkeypatch.context() as patch:
            patch.setattr(place, signalling)
            with pytest.raises(SystemExit) as end:
                main([words[0], f"model.path={folder}", *SMALL, *words[1:]])
        assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
        return end.value.code, *capsys.readouterr()

    return run


def _resolve(place):
    """The object that `monkeypatch.setattr(place, ...)` would replace."""
    import importlib

    module, _, rest = place.rpartition(".")
    try:
        return getattr(importlib.import_module(module), rest)
    except ModuleNotFoundError:
        return getattr(_resolve(module), rest)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("run", RUNS)
def test_sigterm_ends_a_run_at_any_phase_with_its_exit_code_and_without_a_trace(sent, run, phase):
    code, out, err = sent(RUNS[run], signal.SIGTERM, PHASES[phase])
    assert code == 143 and "Traceback" not in err and err.splitlines()[-1] == "interrupted"
    if phase not in ("running", "closing"):
        assert out == ""


@pytest.mark.parametrize("phase", ["composing", "loading", "running"])
def test_interrupt_ends_as_sigterm_does_with_an_exit_code_of_its_own(sent, phase):
    code, _, err = sent(RUNS["generate"], signal.SIGINT, PHASES[phase])
    assert code == 130 and "Traceback" not in err and err.splitlines()[-1] == "interrupted"


def test_signal_while_a_line_is_written_leaves_whole_lines_of_all_that_had_begun(sent, tmp_path):
    code, out, err = sent(RUNS["generate"], signal.SIGTERM, "framework.runs.output_file.OutputFile.write")
    assert (code, out) == (143, "") and "Traceback" not in err
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {line["id"]: line["finish_reason"] for line in lines} == {"1": "length", "2": "abort"}
    assert lines[0]["text"] == "w5 w6"


@pytest.mark.parametrize("place", ["framework.engine.build.choose", "framework.engine.build._assemble"])
def test_signal_before_the_first_step_leaves_an_earlier_output_as_it_was(sent, tmp_path, place):
    (tmp_path / "out.jsonl").write_text("earlier\n")
    assert sent(RUNS["generate"], signal.SIGTERM, place)[0] == 143
    assert (tmp_path / "out.jsonl").read_text() == "earlier\n"


def ended(tmp_path, program):
    """(exit code, stdout, stderr) of a Python program that Ctrl-C may interrupt."""
    program = f"import os, signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n{program}"
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    return result.returncode, result.stdout, result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("module", ["framework.cli", "omegaconf", "torch"])
def test_signal_while_the_program_starts_ends_it_without_a_trace(number, module, tmp_path):
    program = f"""
class Signalling:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            try:
                os.kill(os.getpid(), {int(number)})
            except KeyboardInterrupt:
                pass  # as an import that hides it would

sys.meta_path.insert(0, Signalling())
from framework.__main__ import program
program(["generate", "prompt=x"])
"""
    assert ended(tmp_path, program) == (128 + number, "", "interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_while_an_embedded_command_line_starts_ends_it_without_a_trace(number, tmp_path):
    program = f"""
import framework.composing
framework.composing.parts_of = lambda cfg: os.kill(os.getpid(), {int(number)})
from framework.cli import main
main(["generate", "prompt=x"])
"""
    assert ended(tmp_path, program) == (128 + number, "", "interrupted\n")


HOLDING = """
import atexit
import framework.runs.plugins as plugins
from framework.__main__ import program
from framework.runs.signals import held_signals

def run(config, args):
    with held_signals() as stop:
        print("kept")
        for number in {numbers}:
            os.kill(os.getpid(), number)
        print("going on", flush=True)
        stop.end()

atexit.register(print, "left at the end")
plugins.run = run
program(["plugins"])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_program_that_a_signal_ends_prints_all_it_has_and_leaves_nothing_for_the_end(number, tmp_path):
    code, out, err = ended(tmp_path, HOLDING.format(numbers=[int(number)]))
    assert (code, out, err) == (128 + number, "kept\ngoing on\n", "interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_ends_at_once_with_the_same_code(number, tmp_path):
    code, out, err = ended(tmp_path, HOLDING.format(numbers=[int(number)] * 2))
    assert (code, "going on" in out, err) == (128 + number, False, "interrupted\n")


def test_program_whose_starter_ignores_ctrl_c_goes_on(tmp_path):
    program = "import framework.ending as e; signal.signal(signal.SIGINT, signal.SIG_IGN); e.install()\n"
    program += "os.kill(os.getpid(), signal.SIGINT); print('on', flush=True); os.kill(os.getpid(), signal.SIGTERM)"
    assert ended(tmp_path, program) == (143, "on\n", "interrupted\n")
