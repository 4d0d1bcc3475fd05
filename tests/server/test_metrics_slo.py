"""Keys `server.slo.*` and `server.otlp_endpoint` on the command line: what they come to, and what is refused."""

import pytest

from framework.composing import load, parts_of
from framework.discovery import search_roots
from framework.errors import ConfigError
from framework.server.metrics_slo import Objectives


def options_of(*words):
    return parts_of(load(words, search_roots()))[2].server


def test_nothing_is_stated_by_default():
    options = options_of()
    assert (options.slo, options.slo.stated(), options.otlp_endpoint) == (Objectives(), {}, None)


def test_words_state_objectives():
    slo = options_of("server.slo.ttft_ms=200", "server.slo.e2e_ms=1.5").slo
    assert slo.stated() == {"ttft_ms": 200.0, "e2e_ms": 1.5}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("server.slo.ttft_ms=-1", r"server\.slo\.ttft_ms=-1\.0 must be above 0 and finite, milliseconds, or null"),
        ("+server.slo.tfft_ms=1", r"server\.slo\.tfft_ms: there is no such key\. Did you mean 'ttft_ms'\?"),
        ("server.slo.e2e_ms=soon", r"server\.slo\.e2e_ms: Value 'soon' of type 'str' could not be converted to Float"),
        ("server.slo=5", r"server\.slo=5 names no objective\. Use server\.slo\.ttft_ms=5"),
    ],
)
def test_what_is_no_objective_is_refused(word, message):
    with pytest.raises(ConfigError, match=message):
        options_of(word)


def test_address_for_traces_is_refused_before_a_model_is_loaded(typed_here):
    words = ("serve", "server.otlp_endpoint=localhost", "server.port=0", "model.path=nowhere")
    code, _, err = typed_here(*words)
    assert code == 2
    assert "server.otlp_endpoint=localhost is no address. Use one like http://localhost:4318" in err
