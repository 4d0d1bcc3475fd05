"""What `run=serve` refuses before a model is loaded; what it serves stands in tests/server."""

import socket

import pytest


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["serve", "prompt=Hello"], "prompt=Hello means nothing to run=serve; requests say what is generated"),
        (["serve", "bench.seed=1"], "bench.seed=1 means nothing to run=serve; use run=bench"),
        (
            ["serve", "sampler.output_kind=delta"],
            "sampler.output_kind=delta means nothing to run=serve",
        ),
        (["serve", "server.port=abc"], "server.port: Value 'abc'"),
        (["serve", "server.port=99999"], "server.port=99999 is too large. Use 65535 or less, or 0 for a free one"),
        (["serve", "server.prt=1"], "server.prt: there is no such key. Did you mean 'port'?"),
        (
            ["serve", "server.host=no.such.host.invalid"],
            "server.host=no.such.host.invalid, server.port=8000: ",
        ),
        (["serve", "server.tool_format=hermse"], "server.tool_format=hermse: there is no such choice. Did you mean"),
        (["serve", "server.api_keys_file=absent"], "server.api_keys_file=absent: cannot be read"),
        (["generate", "server.port=1"], "server.port=1 means nothing to run=generate; use run=serve, or leave it out"),
    ],
)
def test_word_that_cannot_be_served_is_refused(typed_here, words, says):
    code, out, err = typed_here(*words)
    assert (code, out) == (2, "") and says in err


def test_port_that_is_taken_is_refused_before_the_model_is_loaded(typed_here):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = typed_here("serve", f"server.port={port}", "model.path=there-is-no-such-model")
    assert (code, out) == (2, "")
    assert f"server.host=127.0.0.1, server.port={port}: cannot listen there (Address already in use)" in err
    assert "server.port=0 for a free port" in err
