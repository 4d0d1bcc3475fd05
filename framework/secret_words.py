"""Which keys hold secrets, and which words of a command line may: reports leave their values out.

Read by whoever tells what was typed or what was configured: the command line, sweeps, the server's page.
"""

from __future__ import annotations

import re

_NAMES = r"(?:api_keys?|token|password|secret)"
_KEY = re.compile(rf"(?:^|[._]){_NAMES}$")
_IN_WORD = re.compile(rf"(?:^|[._{{\[,\s'\"]){_NAMES}['\"]?\s*[:=]")
NOT_SHOWN = "(not shown)"


def is_secret(key: str) -> bool:
    """Whether the value of `a.b.key` is nobody's business: that of server.api_keys is, of model.tokenizer is not."""
    return _KEY.search(key) is not None


def may_hold_secret(word: str) -> bool:
    """Of a word `key=value`: its key is one, or its value names one, as server={api_keys: [x]} does."""
    return _IN_WORD.search(word) is not None
