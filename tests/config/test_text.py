"""Text keys arrive byte for byte, whatever stands in them."""

import json
import os
import subprocess
import sys

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from framework.errors import ConfigError
from framework.words import quoted

AWKWARD = [
    "Hello, {world} = (what?)",
    "What's up?",
    'She said "no"',
    'it\'s "both"',
    "a,b,c",
    "[1, 2",
    "{a: b}",
    "${oc.env:HOME}",
    "\\${x}",
    "\\\\${x}",
    "ends with \\",
    "ends with \\\\",
    "\\' and \\\\' and '",
    "'quoted'",
    "'",
    "''",
    "\\",
    " padded ",
    "",
    "null",
    "true",
    "1e5",
    "~gone",
    "+plus",
    "--flag",
    "key=value=more",
    "line one\nline two\r\n\ttabbed",
    "zażółć 漢字 🙂",
    "range(1,3)",
    "choice(a,b)",
    "$PATH `ls` $(ls) %s %(x)s",
    "# not a comment: @home",
    "a\u2028b\u00a0c",
    "x" * 3000,
]


def delivered(text):
    """The value that arrives through Hydra's grammar and OmegaConf's interpolation."""
    override = OverridesParser.create().parse_override(f"++prompt={quoted(text)}")
    assert not override.is_sweep_override()
    return OmegaConf.create({"prompt": override.value()}).prompt


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text_is_delivered(text):
    assert delivered(text) == text


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=st.sampled_from(list("\\'\"${}[](),=: ab\n@~+")), max_size=12))
def test_any_mix_of_marks_is_delivered(text):
    assert delivered(text) == text


def test_awkward_texts_arrive_through_the_whole_command_line(tmp_path):
    program = """
import json
import framework.runs.plugins as plugins
from framework.cli import main
got = []
plugins.run = lambda config, args: got.extend([args.prompt, args.system, args.output, args.prompts_file])
texts = json.load(open("texts.json", encoding="utf-8"))
for i in range(0, len(texts), 4):
    main(["plugins", *(f"{k}={t}" for k, t in zip(["prompt", "system", "output", "prompts_file"], texts[i : i + 4]))])
json.dump(got, open("got.json", "w", encoding="utf-8"))
"""
    texts = [*AWKWARD, *AWKWARD[: -len(AWKWARD) % 4]]
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True)
    assert json.loads((tmp_path / "got.json").read_text()) == texts


def test_at_sign_reads_a_file_byte_for_byte(command_line, tmp_path):
    text = "first line\r\n${second} 'line'\\\n"
    (tmp_path / "prompt.txt").write_bytes(text.encode())
    assert command_line(f"prompt=@{tmp_path}/prompt.txt")[2].prompt == text


def test_missing_prompt_file_is_refused_by_name(command_line):
    with pytest.raises(ConfigError, match=r"prompt=@nowhere\.txt: cannot read the file"):
        command_line("prompt=@nowhere.txt")


def test_only_prompt_and_system_read_files(command_line):
    assert command_line("output=@out.jsonl")[2].output == "@out.jsonl"
