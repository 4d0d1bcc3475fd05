"""The compatibility page is what its sources say, and what it calls tested is run here, two choices at a time."""

import importlib.util
import sys
from itertools import combinations, product

import pytest

from framework import SamplingParams
from framework.engine.build import build_engine
from framework.plugins import registry
from framework.testing.byte_model import save_byte_model

from .pages import ROOT

SPEC = importlib.util.spec_from_file_location("build_compatibility", ROOT / "docs" / "build_compatibility.py")
build = sys.modules[SPEC.name] = importlib.util.module_from_spec(SPEC)  # its dataclasses look for it there
SPEC.loader.exec_module(build)
EOS = 299


@pytest.fixture(scope="module")
def plugins():
    return registry()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_byte_model(tmp_path_factory.mktemp("compatibility"), (EOS,))


def test_page_is_as_the_sources_are(plugins):
    missing = [spec.name for kind in build.KINDS for spec in plugins.specs(kind) if plugins.usable(kind, spec.name)]
    if missing:
        pytest.skip(f"the page is written where every component can be used; here {', '.join(missing)} cannot")
    assert build.PAGE.read_text(encoding="utf-8") == build.page(), "run python docs/build_compatibility.py"


def covering(values, refused):
    """Few choices of one value a factor, in which every pair that is not refused stands together."""
    pairs = [(a, b) for a, b in combinations(values, 2) if a.factor != b.factor and (a.label, b.label) not in refused]
    factors = list(dict.fromkeys(value.factor for value in values))
    is_open, cases = dict.fromkeys(pairs), []
    while is_open:
        case = {value.factor: value for value in next(iter(is_open))}
        for factor in factors:
            if factor not in case:
                others = [value for value in values if value.factor == factor]
                fitting = [v for v in others if not any((v.label, o.label) in refused for o in case.values())]
                case[factor] = max(
                    fitting, key=lambda v: sum((v, o) in is_open or (o, v) in is_open for o in case.values())
                )
        chosen = tuple(case.values())
        for one, other in product(chosen, chosen):
            is_open.pop((one, other), None)
        cases.append(chosen)
    return cases


def tokens(engine, requests):
    for name, (prompt, params) in requests.items():
        engine.add_request(name, prompt, params)
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = (output.outputs[0].token_ids, output.outputs[0].finish_reason, output.error)
    return found


def requests_of(is_greedy, has_grammar):
    kinds = [{}, {"frequency_penalty": 0.5}, {"min_tokens": 4}, {"allowed_token_ids": list(range(60, 99))}]
    kinds += [{"structured_outputs": {"regex": "[a-d]{3,5}"}}] if has_grammar else []
    kinds += [] if is_greedy else [{"temperature": 0.7}]
    return {
        f"r{n}": ([1 + (7 * n + i) % 90 for i in range(12 + 3 * n)], SamplingParams(seed=n, max_tokens=8, **words))
        for n, words in enumerate(kinds)
    }


def test_choices_that_the_page_calls_tested_give_the_same_tokens_alone_and_together(model, plugins):
    values = build.values(plugins)
    refused = build.refused_pairs(model, plugins, values)
    for chosen in covering(values, refused):
        names = {value.factor: value.name for value in chosen}
        pool = 40 if names["sampler"] == "mirostat" else 7  # where nothing may be preempted, and where somebody must be
        engine = build_engine(build.config_of(model, chosen, num_blocks=pool), plugins)
        try:
            requests = requests_of(names["sampler"] == "greedy", names["grammar"] != "none")
            together = tokens(engine, requests)
            for name, request in requests.items():
                alone = tokens(engine, {name: request})
                assert alone[name] == together[name], f"{name} of {', '.join(v.label for v in chosen)}"
                assert alone[name][2] is None
        finally:
            engine.close()


# ------------------------------------------------------------------------------------------------ pairs of stages


def test_stages_that_the_page_calls_tested_give_the_same_tokens_alone_and_together(model, plugins):
    cases = build.stage_cases(plugins)
    kinds = {name: case.target.spec.kind for name, case in cases.items()}
    selects = [name for name in cases if kinds[name] == "select"]
    pairs = [pair for pair, state in build.stage_pairs(plugins).items() if state == "tested" and pair[0] < pair[1]]
    run = set()
    for select in selects:
        engine = build_engine(build.with_every_stage(model, plugins, select), plugins)
        try:
            requests = {}
            for one, other in pairs:
                theirs = {one, other} & set(selects) or {"gumbel"}
                if theirs != {select}:
                    continue
                params = build.merged(cases[one], cases[other])
                requests[f"{one} {other}"] = ([3, 1, 4, 1, 5], params)
                run.add((one, other))
            together = tokens(engine, requests)
            for name, request in requests.items():
                assert tokens(engine, {name: request})[name] == together[name], f"{name} with {select}"
        finally:
            engine.close()
    assert run == set(pairs)
