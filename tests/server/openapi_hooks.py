"""Read by schemathesis: bodies that have a chance, beside those that it makes by itself.

A body of thirty fields of any value is refused for one of them. Each second one is thinned here, down to what it needs
and a few fields more, and asks for the model that is served.
"""

from zlib import crc32

import schemathesis

NEEDED = ("prompt", "messages", "input", "tokens", "stream")
PLAIN = {
    "temperature": 0, "n": 1, "max_tokens": 4, "top_p": 0.5, "seed": 1, "logprobs": 2, "echo": True, "input": "<3>",
    "messages": [{"role": "user", "content": "<3>"}],
}  # fmt: skip
"""Values of fields that are kept, where hardly one that is made at random would be taken."""


@schemathesis.hook
def map_body(context, body):
    if not isinstance(body, dict) or crc32(repr(body).encode(errors="replace")) % 2:
        return body
    kept = {name: value for name, value in body.items() if name in NEEDED or crc32(name.encode()) % 7 == len(body) % 7}
    return {name: PLAIN.get(name, value) for name, value in kept.items() if name != "model"}
