"""JSON of answers and events, as clients split it."""

import json
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("fastapi") is None, reason="the server comes with the extra `serve`")


def test_text_of_an_event_is_one_line_to_every_client():
    from framework.server.streaming import event

    text = "".join(map(chr, range(0x3000)))
    told = event({"text": text})
    assert told.endswith("\n\n") and len(told.splitlines()) == 2
    assert json.loads(told.removeprefix("data: ")) == {"text": text}
