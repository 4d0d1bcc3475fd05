"""Where a config.json keeps the text model of a checkpoint that has more than that. Loaders size an engine by it, and
families read it, so that both go by one rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NESTED = "text_config"
_OF_THE_WHOLE = "tie_word_embeddings"


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the text model: those in `text_config`, where there is one, stand over those beside it.

    `tie_word_embeddings` is the other way round: the head belongs to the whole, and the text model's own word is the
    default of its class in what transformers 5 saves. Keys beside are kept, since one of them may have to be refused.
    """
    text = config.get(NESTED)
    if not isinstance(text, Mapping):
        return dict(config)
    found = {**{key: value for key, value in config.items() if key != NESTED}, **text}
    if config.get(_OF_THE_WHOLE) is not None:
        found[_OF_THE_WHOLE] = config[_OF_THE_WHOLE]
    return found
