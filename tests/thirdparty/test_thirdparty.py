"""A third party's parts are selected from the command line; broken ones are named and harmless."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from framework import SamplingParams
from framework.batch import Rows
from framework.errors import RequestError
from framework.sampling.admission import check_request
from framework.sampling.deployed import Deployed


def test_stage_and_policy_are_selected_from_the_command_line(framework):
    result = framework(
        "+sampler/stage=acme_bias", "+policy=acme_lifo", "sampler.stages.acme_bias.token_ids=[5,7]", "--cfg", "job"
    )
    assert result.returncode == 0, result.stderr
    composed = yaml.safe_load(result.stdout)
    assert composed["policy"] == {"name": "acme_lifo"}
    assert composed["sampler"]["stages"]["acme_bias"]["token_ids"] == [5, 7]


def test_run_plugins_lists_the_good_and_quotes_the_broken(framework):
    result = framework("plugins", "+sampler/stage=acme_bias", "+policy=acme_lifo")
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["stage", "acme_bias", "acme", "1.2.0", "1.0", "active"] in lines
    assert ["policy", "acme_lifo", "acme", "1.2.0", "1.0", "active"] in lines
    assert ["policy", "clash_free", "clash", "1.2.0", "1.0", "usable"] in lines
    assert ["stage", "min_p", "framework", "0.1.0", "1.0", "active"] in lines
    assert "broken of broken 1.2.0: RuntimeError: libbroken is too old: 3 < 4" in result.stdout
    refused = "clash of clash 1.2.0: stage/min_p is refused: framework announces a component of that name as well"
    assert refused in result.stdout
    assert "future of future 1.2.0: policy/future_policy needs plugin API 1.99, but this is 1.0" in result.stdout
    for name in ("broken", "clash", "future"):
        assert f"plugin {name} of {name} 1.2.0" in result.stderr


def test_component_of_a_broken_plugin_is_refused_with_the_reason(framework):
    result = framework("+sampler/stage=broken_stage", "--cfg", "job")
    assert result.returncode == 2
    error = result.stderr.splitlines()[-1]
    assert error.startswith("error: stage=broken_stage: no installed plugin provides it.")
    assert "Failed to import: broken (RuntimeError: libbroken is too old: 3 < 4)." in error


def test_value_is_checked_with_the_third_partys_own_dataclass(framework):
    result = framework("+sampler/stage=acme_bias", "sampler.stages.acme_bias.bias=much", "--cfg", "job")
    assert result.returncode == 2
    assert "sampler.stages.acme_bias.bias: Value 'much' of type 'str'" in result.stderr.splitlines()[-1]


def test_help_shows_the_third_partys_choice_with_its_distribution(framework):
    result = framework("--help")
    assert "  acme_lifo      Last come, first served [acme]\n" in result.stdout
    assert "  acme_bias      Adds a bias to chosen tokens [acme]\n" in result.stdout


def test_switch_leaves_a_plugin_out_with_its_yaml(framework):
    result = framework("+policy=acme_lifo", "--cfg", "job", FRAMEWORK_PLUGINS="-acme,-broken,-clash,-future")
    assert result.returncode == 2
    assert result.stderr == "error: policy=acme_lifo: there is no such choice. Choices: fcfs, priority, shortest\n"


def test_stage_stands_before_its_anchor_also_when_the_sampler_lacks_it(installed, tmp_path):
    program = """
from framework.config import compose
for words in ([], ["sampler=greedy"], ["sampler.stages.acme_bias.before=top_k"]):
    keys = [s.key for s in compose(["+sampler/stage=acme_bias", *words]).sampler.stages]
    print(keys[keys.index("penalties"):])
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(installed)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.stdout.splitlines() == [
        "['penalties', 'acme_bias', 'temperature', 'min_p', 'top_k', 'top_p', 'gumbel']",
        "['penalties', 'acme_bias', 'greedy']",
        "['penalties', 'temperature', 'min_p', 'acme_bias', 'top_k', 'top_p', 'gumbel']",
    ], result.stderr


@pytest.fixture
def stage(installed, monkeypatch):
    """(stage over 4 table rows and 10 tokens, its column): bias 2 on tokens 5 and 7."""
    monkeypatch.syspath_prepend(str(installed))
    from acme_plugin.bias import AcmeBias
    from acme_plugin.config import AcmeBiasConfig

    scale = np.zeros(4, dtype=np.float32)
    column = SimpleNamespace(np=scale, dev=torch.from_numpy(scale))
    context = SimpleNamespace(device=torch.device("cpu"), vocab_size=10, column=lambda name: column)
    return AcmeBias(AcmeBiasConfig(token_ids=[5, 7], bias=2.0), context), column


def rows_of(*req_idx):
    index = torch.tensor(req_idx)
    return Rows(index, index, index, index, index, index, np.array(req_idx, dtype=np.int32))


def test_bias_reaches_only_the_rows_that_want_it(stage):
    acme, _ = stage
    acme.add_request(1, SamplingParams(), None)
    acme.add_request(2, SamplingParams(extra_args={"acme_bias": {"scale": -3}}), None)
    acme.add_request(3, SamplingParams(extra_args={"acme_bias": {"scale": 0}}), None)
    logits = torch.zeros(3, 10)
    logits[2] = -0.0
    before = logits.clone()
    acme.apply(logits, rows_of(2, 1, 3))
    expected = before.clone()
    expected[0, [5, 7]] = -6.0
    expected[1, [5, 7]] = 2.0
    assert torch.equal(logits.view(torch.int32), expected.view(torch.int32))  # bit-equal: -0.0 stays -0.0


def test_unknown_extra_argument_is_refused_with_the_nearest(stage):
    deployed = [Deployed("acme_bias", stage[0].spec, stage[0], SimpleNamespace(), 1)]
    check_request("gumbel", deployed, 10, SamplingParams(extra_args={"acme_bias": {"scale": 1}}))
    with pytest.raises(RequestError, match=r"extra_args\.acme_bias has no 'scal'\. Did you mean 'scale'\?"):
        check_request("gumbel", deployed, 10, SamplingParams(extra_args={"acme_bias": {"scal": 1}}))
    with pytest.raises(RequestError, match=r"'acme_bias' refuses the request: extra_args\.acme_bias\.scale must be"):
        check_request("gumbel", deployed, 10, SamplingParams(extra_args={"acme_bias": {"scale": "1"}}))


def test_lifo_runs_the_newest_and_preempts_the_oldest(installed, monkeypatch):
    monkeypatch.syspath_prepend(str(installed))
    from acme_plugin.lifo import AcmeLifo

    requests = [SimpleNamespace(arrival_index=i) for i in (0, 1, 2)]
    policy = AcmeLifo({}, None)
    assert [r.arrival_index for r in policy.order(requests)] == [2, 1, 0]
    assert policy.victim(requests).arrival_index == 0
