"""A word that the chosen run does not read is refused before anything is loaded."""

import pytest

from framework.cli import main
from framework.errors import ConfigError
from framework.runs import RunArgs
from framework.runs.unread import refuse_unread

RUNS = ("generate", "chat", "explain", "plugins")


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("word", ["bench.num_prompts=3", "bench=latency"])
def test_keys_of_the_benchmark_are_refused_by_every_other_run(run, word, capsys, quiet_logging):
    with pytest.raises(SystemExit) as end:
        main([run, word, "model.path=/nowhere/at/all"])
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert err == f"error: {word} means nothing to run={run}; use run=bench, or leave it out\n"


def test_texts_are_refused_by_the_run_that_lists_plugins(capsys, quiet_logging):
    with pytest.raises(SystemExit):
        main(["plugins", "prompt=x"])
    assert capsys.readouterr().err == "error: prompt=x means nothing to run=plugins; leave it out\n"


def test_only_whole_names_count():
    args = RunArgs(typed={"sampler.n": "sampler.n=2", "benches": "benches=1"})
    refuse_unread("x", args, {"sampler.name": "no", "bench": "no", "sampler.n.deeper": "no"})
    with pytest.raises(ConfigError, match=r"^sampler\.n=2 means nothing to run=x; yes$"):
        refuse_unread("x", args, {"sampler": "yes"})
