"""A small model that says `Aé漢.` one byte a token, and a terminal to run a command line in."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from framework.testing.crafted import save_crafted

SMALL = ("engine.dtype=float32", "engine.max_model_len=200", "scheduler.max_num_seqs=4", "kv_cache.num_blocks=64")
SAYS = "Aé漢."
SECONDS = 180  # a machine may be busy, or stand still for a minute


@pytest.fixture(scope="session")
def talker(tmp_path_factory):
    """Folder of a byte-level model: after a line break it says `Aé漢.`, then eos; after eos it begins again."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    eos = tokenizer.token_to_id("<eos>")
    (line_break,), says = tokenizer.encode("\n").ids, tokenizer.encode(SAYS).ids
    table = torch.zeros(eos + 1, eos + 1)
    for token, then in zip([line_break, *says, eos], [*says, eos, says[0]], strict=True):
        table[token, then] = 8.0
    folder = save_crafted(tmp_path_factory.mktemp("runs") / "talker", table, eos_token_id=eos)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ mark or '' }}\n{% endfor %}"
    config = {"eos_token": "<eos>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


class Terminal:
    """A program in a pseudo-terminal: what it shows, and what is typed."""

    def __init__(self, program, folder):
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            env = {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1"}
            os.execve(sys.executable, [sys.executable, "-c", program], env)
        self._bytes, self._seen = b"", 0

    @property
    def shown(self):
        """All that was shown, without escape sequences and carriage returns."""
        text = self._bytes.decode("utf-8", "replace")
        return re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", text).replace("\r", "")

    def wait_for(self, text, cause=None):
        """Reads until `text` is shown after all that was waited for before; the text in between.

        cause  called first, and again as often as nothing is shown for a while: a signal that comes just before
               readline waits is noticed at the next key or signal only
        """
        end = time.monotonic() + SECONDS
        was_shown = False
        while text not in self.shown[self._seen :]:
            if cause is not None and not was_shown:
                cause()
            was_shown = self._read(SECONDS if cause is None else 5)
            assert time.monotonic() < end and was_shown is not None, f"{text!r} was not shown: {self.shown!r}"
        at = self.shown.index(text, self._seen)
        between, self._seen = self.shown[self._seen : at], at + len(text)
        return between

    def type(self, text):
        os.write(self._fd, text.encode())

    def exit_code(self):
        """Reads to the end of the program."""
        while self._read(SECONDS):
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self, seconds):
        """True when something was shown, False when nothing was for so many seconds, None at the end of the program."""
        if not select.select([self._fd], [], [], seconds)[0]:
            return False
        try:
            piece = os.read(self._fd, 65536)
        except OSError:  # the other side is closed
            return None
        self._bytes += piece
        return True if piece else None


@pytest.fixture
def terminal(tmp_path, talker):
    """Runs `main(WORDS)` of the command line in a terminal; `slow` seconds are added to every step."""

    def start(*words, slow=0.0):
        program = ""
        if slow:
            program = "import framework.engine.core as c, time; step = c.EngineCore.step\n"
            program += f"c.EngineCore.step = lambda self: (time.sleep({slow}), step(self))[1]\n"
        words = [words[0], f"model.path={talker}", *SMALL, *words[1:]]
        return Terminal(f"{program}from framework.__main__ import program; program({words!r})", tmp_path)

    return start


@pytest.fixture
def command(tmp_path, talker):
    """Runs `python -m framework WORDS` in an empty folder; stdout and stderr are bytes."""

    def run(name, *words, **options):
        words = [name, f"model.path={talker}", *SMALL, *words]
        return subprocess.run(
            [sys.executable, "-m", "framework", *words], cwd=tmp_path, capture_output=True, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, **options,
        )  # fmt: skip

    return run
