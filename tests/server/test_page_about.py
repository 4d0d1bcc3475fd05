"""What the page is drawn from: every parameter described, every value with who set it, every plugin with its state."""

import json
from dataclasses import fields
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")

from framework.config import Config, compose
from framework.plugins import registry
from framework.request import SamplingParams
from framework.server import about
from framework.server.options import ServerOptions

FACTS = {"backend": "cpu", "attention": "cpu", "model": "llama"}


def service(config=None, settings=(), options=None):
    return SimpleNamespace(config=config or Config(), settings=settings, options=options or ServerOptions())


def settings(config=None, options=None):
    return {one["key"]: one["value"] for one in about.settings(service(config, options=options))}


def described(**changes):
    defaults = {f.name: getattr(SamplingParams(**changes), f.name) for f in fields(SamplingParams)}
    return {one["name"]: one for one in about.parameters(defaults)}


def test_every_parameter_is_described_in_words():
    found = described()
    assert found.keys() == {f.name for f in fields(SamplingParams)}
    assert [name for name, one in found.items() if not one["text"]] == []


def test_parameters_whose_type_says_nothing_have_a_shape_and_no_others():
    assert set(about.SHAPES) == {f.name for f in fields(SamplingParams) if f.type == "Any"}
    assert {one["kind"] for one in described().values()} <= {"int", "float", "bool", "text", "strings", "ids", "json"}


def test_sections_hold_parameters_that_are_there():
    grouped = [name for names in about.GROUPS.values() for name in names]
    assert set(grouped) <= {f.name for f in fields(SamplingParams)} and len(grouped) == len(set(grouped))


def test_sections_follow_one_another_and_what_is_in_none_stands_last():
    groups = [one["group"] for one in described().values()]
    assert list(dict.fromkeys(groups)) == [*about.GROUPS, about.OTHER]


def test_defaults_are_those_that_requests_get():
    assert described(temperature=0.2)["temperature"]["default"] == 0.2


def test_stages_say_what_they_read_and_whether_a_request_may_switch_them():
    found = {one["key"]: one for one in about.stages(Config(), registry())}
    assert (found["top_k"]["kind"], found["top_k"]["params"], found["top_k"]["switchable"]) == (
        "threshold",
        ["top_k"],
        True,
    )
    assert not found["grammar"]["switchable"] and not found["gumbel"]["switchable"]


def test_settings_without_a_command_line_are_the_values_of_the_configuration():
    found = settings(compose(["scheduler.max_num_seqs=3"]))
    assert found["scheduler.max_num_seqs"] == 3 and found["engine.dtype"] == "auto"


def test_settings_tell_who_set_them():
    told = SimpleNamespace(key="engine.seed", value=7, source="command line", where="engine.seed=7")
    found = about.settings(service(settings=[told]))
    assert found[0] == {"key": "engine.seed", "value": 7, "source": "command line", "where": "engine.seed=7"}


def test_settings_hold_the_keys_of_the_server_but_none_of_its_secrets():
    found = settings(options=ServerOptions(port=80, api_keys=["hush"]))
    assert found["server.port"] == 80 and found["server.api_keys"] == "(not shown)"
    assert settings()["server.api_keys"] == []


@pytest.mark.parametrize("key", ["x.api_key", "x.token", "x.password"])
def test_secrets_are_told_neither_as_a_value_nor_as_a_word(key):
    told = SimpleNamespace(key=key, value=["hush"], source="command line", where=f"{key}=[hush]")
    assert "hush" not in json.dumps(about.settings(service(settings=[told])))


def test_word_that_sets_a_secret_beside_others_is_covered():
    told = SimpleNamespace(key="x.size", value=7, source="command line", where="x={token:hush,size:7}")
    assert about.settings(service(settings=[told]))[0]["where"] == "x=(not shown)"


def test_name_that_looks_like_a_secret_is_told():
    told = SimpleNamespace(key="model.tokenizer", value="path", source="default", where="conf/config.yaml")
    assert about.settings(service(settings=[told]))[0]["value"] == "path"


def test_components_are_active_usable_or_unusable_with_a_reason():
    found = {(one["kind"], one["name"]): one for one in about.components(Config(), registry(), FACTS)}
    assert found["backend", "cpu"]["state"] == "active"
    assert found["stage", "top_k"]["state"] == "active"
    assert found["policy", "shortest"]["state"] == "usable"
    assert all(one["reason"] for one in found.values() if one["state"] == "unusable")
    json.dumps(list(found.values()))
