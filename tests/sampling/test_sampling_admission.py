"""Nothing a caller named is ignored: a pipeline refuses what it cannot serve, naming both."""

import pytest
import torch

from framework import SamplingParams
from framework.errors import RequestError
from framework.interfaces import StageSpec


class Penalty:
    """A third party's stage that reads a field whose own stage is not built yet."""

    spec = StageSpec("penalty", "elementwise", (), ("presence_penalty",), extra_args=("size",))

    def __init__(self, options, ctx):
        pass

    def wants(self, params):
        return params.presence_penalty != 0

    def validate(self, params):
        given = (params.extra_args or {}).get("penalty", {})
        if given.get("size", 0) < 0:
            raise ValueError(f"extra_args.penalty.size must not be negative, got {given['size']}")

    def add_request(self, req_idx, params, request):
        pass

    def apply(self, logits, rows):
        logits.sub_(1)

    def commit(self, rows, sampled, num_valid):
        pass


class Fixed(Penalty):
    spec = StageSpec("fixed", "mask", essential=True)


def refused(one, text, error=RequestError, **params):
    with pytest.raises(error, match=text):
        one.pipeline.validate(SamplingParams(**params))


@pytest.mark.parametrize(("field", "value"), [("top_k", 5), ("top_p", 0.9), ("min_p", 0.1)])
def test_greedy_sampler_refuses_named_parameters_that_it_does_not_read(bench, field, value):
    text = rf"sampler=greedy has no stage that reads {field}={value}.*Leave {field} out"
    refused(bench("greedy", name="greedy"), text, **{field: value})


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1e-5])
def test_greedy_sampler_refuses_a_named_temperature(bench, temperature):
    text = f"sampler=greedy: stage 'greedy' .*temperature={temperature:g} would be ignored.*sampler=gumbel"
    refused(bench("greedy", name="greedy"), text, temperature=temperature)


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0}, {"temperature": 0.7, "top_k": 1}, {"seed": 3}, {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
     {"logprobs": 3}, {"top_k": 50}, {"bad_words": None, "logit_bias": {}}, {"max_tokens": 3, "ignore_eos": True}],
)  # fmt: skip
def test_greedy_sampler_serves_what_asks_for_nothing_else(bench, params):
    bench("greedy", name="greedy").pipeline.validate(SamplingParams(**params))


def test_values_the_caller_did_not_name_never_refuse(bench):
    params = SamplingParams(temperature=0.6, top_p=0.9)
    object.__setattr__(params, "named", frozenset())
    bench("greedy", name="greedy").pipeline.validate(params)


def test_gumbel_sampler_serves_its_parameters(bench):
    bench().pipeline.validate(SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=-1))


def test_removed_stage_makes_its_parameter_refused_but_not_a_greedy_row(bench):
    one = bench("top_k", "gumbel")
    refused(one, "sampler=gumbel has no stage that reads temperature=0.5", temperature=0.5)
    one.pipeline.validate(SamplingParams(temperature=0))


@pytest.mark.parametrize(
    ("field", "value"),
    [("repetition_penalty", 1.2), ("frequency_penalty", 0.5), ("presence_penalty", -0.5), ("logit_bias", {3: 1.0}),
     ("bad_words", ["x"]), ("bad_words_token_ids", [[1]]), ("allowed_token_ids", [1]),
     ("structured_outputs", {"regex": "a"})],
)  # fmt: skip
def test_parameters_that_no_stage_of_the_pipeline_reads_are_refused(bench, field, value):
    refused(bench(), f"sampler=gumbel has no stage that reads {field}=", **{field: value})


def test_a_third_party_stage_may_serve_a_parameter_in_the_place_of_ours(bench):
    one = bench("penalty", "gumbel", others={"penalty": Penalty})
    one.pipeline.validate(SamplingParams(presence_penalty=0.5))
    refused(
        one,
        "stages switches off 'penalty'.*reads presence_penalty=0.5",
        presence_penalty=0.5,
        stages={"penalty": False},
    )
    refused(one, "sampler=gumbel has no stage that reads frequency_penalty=0.5", frequency_penalty=0.5)


class Odd(Penalty):
    """A third party's mask that forbids what its parameter says."""

    spec = StageSpec("odd", "mask", (), ("allowed_token_ids", "bad_words_token_ids"))

    def wants(self, params):
        return bool(params.bad_words_token_ids)

    def validate(self, params):
        pass

    def forbidden_ids(self, params):
        return {word[0] for word in params.bad_words_token_ids} - {9}


def test_allow_list_of_which_a_stage_forbids_every_id_is_refused(bench):
    one = bench("odd", "gumbel", others={"odd": Odd}, keys={"odd": "renamed"})
    one.pipeline.validate(SamplingParams(allowed_token_ids=[4, 5], bad_words_token_ids=[[4]]))
    one.pipeline.validate(SamplingParams(allowed_token_ids=[4, 9], bad_words_token_ids=[[4], [9]]))
    one.pipeline.validate(SamplingParams(allowed_token_ids=[4]))
    text = r"allowed_token_ids=\[4, 5\] leaves no token: every id of it is forbidden by bad_words_token_ids\. Allow"
    refused(one, text, allowed_token_ids=[4, 5], bad_words_token_ids=[[4], [5], [6]])


def test_switches_name_deployed_stages_only(bench):
    refused(bench(), "stages names 'topk'.* Did you mean 'top_k'.* Deployed: temperature", stages={"topk": False})
    refused(bench(), "stages names 'greedy', which is no stage", stages={"greedy": True})


def test_the_select_stage_and_essential_stages_stay_on(bench):
    refused(bench(), "cannot switch 'gumbel' off: no other stage", stages={"gumbel": False})
    one = bench("fixed", "gumbel", others={"fixed": Fixed})
    refused(one, "cannot switch 'fixed' off", stages={"fixed": False})
    one.pipeline.validate(SamplingParams(stages={"fixed": True}))


def test_a_parameter_of_a_stage_that_the_request_switches_off_is_refused(bench):
    refused(
        bench(), "stages switches off 'top_p'.*sampler=gumbel that reads top_p=0.9", top_p=0.9, stages={"top_p": False}
    )


def test_extra_args_name_deployed_stages_that_take_some(bench):
    one = bench("penalty", "top_p", "gumbel", others={"penalty": Penalty})
    one.pipeline.validate(SamplingParams(extra_args={"penalty": {"size": 1}}))
    refused(one, "extra_args names 'penalties'.*Did you mean 'penalty'", extra_args={"penalties": {}})
    refused(one, r"extra_args\.top_p has no 'a'\. Stage 'top_p' takes none", extra_args={"top_p": {"a": 1}})
    text = r"extra_args\.penalty has no 'sise'\. Did you mean 'size'\? Stage 'penalty' takes size"
    refused(one, text, extra_args={"penalty": {"size": 1, "sise": 2}})
    off = {"extra_args": {"penalty": {"size": 1}}, "stages": {"penalty": False}}
    refused(one, "extra_args has parameters for 'penalty', which stages switches off", **off)


@pytest.mark.parametrize("key", ["penalty", "renamed"])
def test_what_a_stage_refuses_names_the_stage(bench, key):
    one = bench("penalty", "gumbel", others={"penalty": Penalty}, keys={"penalty": key})
    text = f"sampler=gumbel: stage '{key}' refuses the request: extra_args.{key}.size must not be negative, got -1"
    refused(one, text, extra_args={key: {"size": -1}})


def test_refusal_happens_before_a_row_is_written(bench):
    one = bench("greedy", name="greedy").add(SamplingParams())
    logits = torch.zeros(1, 50)
    logits[0, 4] = 1
    with pytest.raises(RequestError):
        one.add(SamplingParams(top_p=0.5))
    assert one.ids(logits) == [4]
