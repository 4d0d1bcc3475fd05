"""A model that says what a script holds: greedy, each piece leads to the next one, and the last to the end.

Its tokens are bytes and the pieces, so that grammars can spell anything. What is asked decides what is said: the last
token of the prompt is the cue.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from framework.testing.crafted import save_crafted

END = "<|end|>"


def save_scripted(folder: Path, scripts: Mapping[str, Sequence[str]], template: str, max_len: int = 4096) -> Path:
    """Writes a folder. scripts: {cue: pieces}, each a token of its own. Returns the folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [*dict.fromkeys(text for cue, pieces in scripts.items() for text in (cue, *pieces))]
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in texts])
    ids = {text: tokenizer.token_to_id(text) for text in (END, *texts)}
    table = torch.zeros(len(alphabet) + len(ids), len(alphabet) + len(ids))
    table[:, ids[END]] = 1.0  # what leads nowhere ends
    for cue, pieces in scripts.items():
        for text, following in zip((cue, *pieces), (*pieces, END), strict=True):
            table[ids[text], ids[following]] = 9.0
    save_crafted(folder, table, eos_token_id=ids[END], max_len=max_len)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": END, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
