"""Typed words become words that Hydra takes; those that mean nothing are refused with the nearest that do."""

import pytest

from framework.discovery import conf_roots
from framework.errors import ConfigError, NotBuiltError
from framework.words import Vocabulary, command_words, override_words


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary.read(conf_roots())


@pytest.mark.parametrize("word", ["+backend=cpu", "++backend=cpu", "backend=cpu"])
def test_leading_plus_changes_nothing_for_a_group_with_one_choice(vocabulary, word):
    assert command_words([word], vocabulary) == ["backend=cpu"]


@pytest.mark.parametrize("word", ["+sampler/stage=min_p", "++sampler/stage=min_p", "sampler/stage=min_p"])
def test_group_outside_the_defaults_list_is_added(vocabulary, word):
    assert command_words([word], vocabulary) == ["+sampler/stage=min_p"]


def test_repeated_additions_to_a_group_become_one_list(vocabulary):
    words = ["+sampler/stage=min_p", "+sampler/stage=[top_k,top_p]"]
    assert command_words(words, vocabulary) == ["+sampler/stage=[min_p,top_k,top_p]"]


def test_first_bare_word_is_the_run_and_the_second_its_target(vocabulary):
    assert command_words(["plugins", "stage/x"], vocabulary) == ["run=plugins", "++target='stage/x'"]


def test_keys_of_hydra_pass_untouched(vocabulary):
    words = ["hydra.verbose=true", "hydra/job_logging=none", "~sampler.stages.min_p"]
    assert command_words(words, vocabulary) == words


def test_sweep_functions_are_left_to_hydra(vocabulary):
    assert command_words(["policy=glob(*)"], vocabulary) == ["policy=glob(*)"]


def test_each_choice_of_a_sweep_is_checked(vocabulary):
    with pytest.raises(ConfigError, match=r"policy=fcsf: there is no such choice\. Did you mean 'fcfs'\?"):
        command_words(["policy=priority,fcsf"], vocabulary)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("+samplr=gumbel", r"\+samplr=gumbel: there is no key or group 'samplr'\. Did you mean 'sampler'\?"),
        ("sampler/stages=min_p", r"no key or group 'sampler/stages'\. Did you mean 'sampler/stage'\?"),
        ("+engin.seed=1", r"no key or group 'engin'\. Did you mean 'engine'\?"),
        ("promt=Hello", r"no key or group 'promt'\. Did you mean 'prompt'\?"),
        (
            "sampler=gumbl",
            r"sampler=gumbl: there is no such choice\. Did you mean 'gumbel'\? Choices: full, greedy, gumbel, ",
        ),
        ("pluginz", r"run=pluginz: there is no such choice\. Did you mean 'plugins'\?"),
        ("backend=[cpu]", r"backend takes one choice, not a list"),
        ("+backend", r"\+backend: a value is missing"),
    ],
)
def test_word_that_means_nothing_is_refused_with_the_nearest(vocabulary, word, message):
    with pytest.raises(ConfigError, match=message):
        command_words([word], vocabulary)


def test_third_bare_word_is_refused(vocabulary):
    with pytest.raises(ConfigError, match="c: only a run and its target may stand without a key"):
        command_words(["plugins", "b", "c"], vocabulary)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("backend=tpu", "backend=tpu is not built yet"),
        ("spec_decode=ngram", r"spec_decode=ngram is not built yet\. Built: none"),
    ],
)
def test_promised_word_is_refused_as_not_built(vocabulary, word, message):
    with pytest.raises(NotBuiltError, match=message):
        command_words([word], vocabulary)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("prompt=Hello", "prompt belongs to the command line alone"),
        ("server.port=80", "server.port belongs to the command line alone"),
        ("run=plugins", "run belongs to the command line alone"),
        ("bench=latency", "bench belongs to the command line alone"),
        ("hydra.verbose=true", r"hydra\.verbose belongs to the command line alone"),
        ("plugins", "is not KEY=VALUE"),
        ("--multirun", "is not KEY=VALUE"),
        (3, "override 3 is not a string"),
    ],
)
def test_overrides_refuse_what_belongs_to_the_command_line(vocabulary, word, message):
    with pytest.raises(ConfigError, match=message):
        override_words([word], vocabulary)


def test_groups_of_an_included_primary_are_known(tmp_path):
    (tmp_path / "exp1.yaml").write_text("defaults: [config, override backend: cpu, _self_]\nengine: {seed: 3}\n")
    read = Vocabulary.read([*conf_roots(), ("user", tmp_path)], "exp1")
    assert "sampler" in read.single and "kv_cache" in read.keys
    with pytest.raises(ConfigError, match=r"--config-name=exp2: there is no exp2\.yaml\. Did you mean 'exp1'\?"):
        Vocabulary.read([*conf_roots(), ("user", tmp_path)], "exp2")
