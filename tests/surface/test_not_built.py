"""What the public surface promises and is not built yet is refused by name, everywhere, and nothing of it is ignored.

Delete an entry here when its part is built, and test the part.
"""

import pytest

from framework import LLM, PoolingParams
from framework.cli import main
from framework.errors import NotBuiltError

SMALL = ("engine.dtype=float32", "engine.max_model_len=64")

WORDS = [
    "kv_cache.dtype=float8_e4m3",
    "spec_decode=ngram",
    "backend=tpu",
]


@pytest.mark.parametrize("word", WORDS)
def test_word_is_refused_by_llm_and_by_the_command_line(folders, capsys, quiet_logging, word):
    key = word.lstrip("+")
    name = "backend" if key.startswith("backend") else key.partition("=")[0]
    with pytest.raises(NotBuiltError, match=rf"{name}.* is not built yet"):
        LLM(folders["chain"], overrides=[*SMALL, word])
    with pytest.raises(SystemExit) as end:
        main(["generate", f"model.path={folders['chain']}", *SMALL, "prompt=w4", word])
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and name in errors[0] and "not built yet" in errors[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate([4], PoolingParams()), "pooling"),
        (lambda llm: llm.engine.add_request("a", [4], PoolingParams()), "pooling"),
        (lambda llm: llm.generate({"prompt_embeds": [[0.0]]}), "prompt_embeds"),
        (lambda llm: llm.generate({"prompt": "w4", "lora": "x"}), "lora"),
    ],
)
def test_call_is_refused_by_name(chain, call, message):
    with pytest.raises(NotBuiltError, match=f"{message}.* is not built yet"):
        call(chain)
    assert not chain.engine.has_unfinished_requests()
