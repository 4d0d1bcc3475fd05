"""`/v1/completions` over HTTP: what is answered, whole and streamed, on a model where t is followed by t + 1."""

import math

import pytest

from framework.server.corked import Chunks

from .here import events_of, serving

GREEDY = {"temperature": 0, "max_tokens": 3}


def test_text_goes_on_and_tokens_are_counted(here):
    answer = here.complete(model="small", prompt="w5 w6", **GREEDY).json()
    assert answer["object"] == "text_completion" and answer["model"] == "small"
    assert answer["choices"][0]["text"] == "w7 w8 w9"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert {k: answer["usage"][k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
    }


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("w5", ["w6 w7 w8"]),
        (["w5", "w10"], ["w6 w7 w8", "w11 w12 w13"]),
        ([5], ["w6 w7 w8"]),
        ([[5], [1, 10]], ["w6 w7 w8", "w11 w12 w13"]),
    ],
)
def test_prompt_may_be_text_or_ids_or_a_list_of_either(here, prompt, texts):
    choices = here.complete(prompt=prompt, **GREEDY).json()["choices"]
    assert [choice["text"] for choice in choices] == texts
    assert [choice["index"] for choice in choices] == list(range(len(texts)))


def test_choices_of_several_prompts_with_n_stand_prompt_by_prompt(here):
    choices = here.complete(prompt=["w5", "w10"], n=2, **GREEDY).json()["choices"]
    assert [choice["text"] for choice in choices] == ["w6 w7 w8"] * 2 + ["w11 w12 w13"] * 2
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]


def test_max_tokens_is_16_when_left_out(here):
    assert here.complete(prompt="w5", temperature=0, ignore_eos=True).json()["usage"]["completion_tokens"] == 16


def test_configured_defaults_stand_where_the_request_is_silent(chain):
    with serving(chain, "sampler.max_tokens=2", "sampler.temperature=0") as configured:
        assert configured.complete(prompt="w5").json()["choices"][0]["text"] == "w6 w7"
        assert configured.complete(prompt="w5", max_tokens=1).json()["choices"][0]["text"] == "w6"
        chat = configured.chat(messages=[{"role": "user", "content": "w5"}]).json()
        assert chat["usage"]["completion_tokens"] == 2


def test_stop_string_ends_the_text_and_is_told(here):
    choice = here.complete(prompt="w5", temperature=0, max_tokens=9, stop=["w8"]).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("w6 w7 ", "stop", "w8")


def test_own_fields_reach_the_sampler(here):
    banned = here.complete(prompt="w5", bad_words_token_ids=[[6]], allowed_token_ids=[6, 11], **GREEDY).json()
    assert banned["choices"][0]["text"].split()[0] == "w11"
    stopped = here.complete(prompt="w5", stop_token_ids=[7], temperature=0, max_tokens=9, return_token_ids=True).json()
    assert stopped["choices"][0]["token_ids"] == [6, 7]
    assert stopped["choices"][0]["prompt_token_ids"] == [1, 5]
    off = here.complete(prompt="w5", logit_bias={"12": 100}, stages={"logit_bias": False}, **GREEDY)
    assert off.status_code == 400 and "logit_bias" in off.json()["error"]["message"]


def test_same_seed_gives_the_same_text(here):
    body = {"prompt": "w5", "temperature": 8.0, "seed": 7, "max_tokens": 8, "ignore_eos": True}
    first, second, other = (here.complete(**{**body, **more}).json() for more in ({}, {}, {"seed": 8}))
    assert first["choices"][0]["text"] == second["choices"][0]["text"] != other["choices"][0]["text"]


def test_logit_bias_takes_ids_as_json_writes_keys(here):
    assert (
        here.complete(prompt="w5", temperature=0, max_tokens=1, logit_bias={"12": 100}).json()["choices"][0]["text"]
        == "w12"
    )


# ------------------------------------------------------------------------------------------------------- logprobs


def test_logprobs_tell_tokens_best_ones_and_offsets(here):
    told = here.complete(prompt="w5", logprobs=2, **GREEDY).json()["choices"][0]["logprobs"]
    expected = 8.0 - math.log(math.exp(8.0) + 23)
    assert told["tokens"] == ["w6", "w7", "w8"]
    assert told["token_logprobs"] == pytest.approx([expected] * 3, abs=1e-4)
    assert [len(best) for best in told["top_logprobs"]] == [2, 2, 2]
    assert told["text_offset"] == [0, 2, 4]


def test_logprobs_of_listed_ids_stand_among_the_top_ones(here):
    told = here.complete(prompt="w5", logprobs=0, logprob_token_ids=[20], **GREEDY).json()["choices"][0]["logprobs"]
    assert [set(best) for best in told["top_logprobs"]] == [{"w6", "w20"}, {"w7", "w20"}, {"w8", "w20"}]
    alone = here.complete(prompt="w5", logprob_token_ids=[20])
    assert alone.status_code == 400 and "needs logprobs" in alone.json()["error"]["message"]


def test_without_a_number_of_logprobs_only_the_token_has_its_own(here):
    told = here.complete(prompt="w5", logprobs=0, **GREEDY).json()["choices"][0]["logprobs"]
    assert told["top_logprobs"] is None and len(told["token_logprobs"]) == 3


def test_echo_begins_with_the_prompt_and_its_logprobs(here):
    choice = here.complete(prompt="w5 w6 w9", echo=True, logprobs=1, temperature=0, max_tokens=1).json()["choices"][0]
    told = choice["logprobs"]
    assert choice["text"] == "w5 w6 w9w10"
    assert told["tokens"] == ["<s>", "w5", "w6", "w9", "w10"]
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    likely, unlikely = 8.0 - math.log(math.exp(8.0) + 23), -math.log(math.exp(8.0) + 23)
    assert told["token_logprobs"][1:] == pytest.approx([unlikely, likely, unlikely, likely], abs=1e-4)
    assert told["top_logprobs"][3]["w7"] == pytest.approx(likely, abs=1e-4)


def test_echo_with_no_tokens_tells_the_prompt_alone(here):
    answer = here.complete(prompt="w5 w6", echo=True, logprobs=1, max_tokens=0).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("w5 w6", "length")
    assert choice["logprobs"]["tokens"] == ["<s>", "w5", "w6"]
    assert answer["usage"]["completion_tokens"] == 0


def test_echo_streams_the_prompt_once_for_each_choice(here):
    body = {"prompt": ["w5", "w10"], "echo": True, "logprobs": 0, "stream": True, **GREEDY}
    events = events_of(here.complete(**body).text)
    texts = ["", ""]
    tokens = [[], []]
    for one in events:
        choice = one["choices"][0]
        texts[choice["index"]] += choice["text"]
        tokens[choice["index"]] += choice["logprobs"]["tokens"]
    assert texts == ["w5w6 w7 w8", "w10w11 w12 w13"]
    assert tokens[1] == ["<s>", "w10", "w11", "w12", "w13"]


def test_streamed_echo_with_no_tokens_tells_the_prompt_alone(here):
    (one,) = events_of(here.complete(prompt="w5 w6", echo=True, logprobs=1, max_tokens=0, stream=True).text)
    choice = one["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("w5 w6", "length")
    assert choice["logprobs"]["tokens"] == ["<s>", "w5", "w6"]


def test_masked_logprob_is_null(chain):
    with serving(chain, "sampler.logprobs_mode=processed_logprobs") as processed:
        told = processed.complete(prompt="w5", allowed_token_ids=[6], logprobs=3, max_tokens=1, temperature=1.0).json()[
            "choices"
        ][0]["logprobs"]
    assert told["token_logprobs"] == [0.0]
    assert None in told["top_logprobs"][0].values()


# ------------------------------------------------------------------------------------------------------ streaming


def test_stream_has_the_text_of_the_whole_answer_in_pieces(here):
    body = {"prompt": "w5", "temperature": 0, "max_tokens": 5}
    response = here.complete(stream=True, **body)
    events = events_of(response.text)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "".join(one["choices"][0]["text"] for one in events) == here.complete(**body).json()["choices"][0]["text"]
    reasons = [one["choices"][0]["finish_reason"] for one in events]
    assert reasons[-1] == "length" and set(reasons[:-1]) == {None}
    assert len({one["id"] for one in events}) == 1


def test_events_behind_the_first_go_past_the_layers_of_the_application(here, monkeypatch):
    def noted(chunks, data):
        told.append(data.decode())
        return write(chunks, data)

    told, write = [], Chunks.write
    monkeypatch.setattr(Chunks, "write", noted)
    body = {"prompt": "w5", "temperature": 0, "max_tokens": 200, "ignore_eos": True}
    for ask in (
        here.complete,
        lambda **body: here.chat(messages=[{"role": "user", "content": body.pop("prompt")}], **body),
    ):
        text = ask(stream=True, **body).text
        assert len(told) > 20 and all(one in text for one in told)
        events_of(text)
        told.clear()


def test_events_of_text_alone_have_the_fields_of_the_others(here):
    """Which are made in another way."""
    body = {"prompt": "w5", "temperature": 0, "max_tokens": 40, "ignore_eos": True, "stream": True}
    events = [*events_of(here.complete(**body).text), *events_of(here.complete(return_token_ids=True, **body).text)]
    fields = list(events[-1]), [name for name in events[-1]["choices"][0] if not name.endswith("token_ids")]
    assert len(fields[1]) == 5
    for event in events:
        (choice,) = event["choices"]
        assert (list(event), [name for name in choice if not name.endswith("token_ids")]) == fields
        assert choice["index"] == 0 and choice["logprobs"] is choice["stop_reason"] is None


def test_stream_tells_its_usage_when_asked(here):
    events = events_of(here.complete(prompt="w5", stream=True, stream_options={"include_usage": True}, **GREEDY).text)
    assert [one["usage"] for one in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 3 and events[-1]["usage"]["prompt_tokens"] == 2


def test_streams_of_several_prompts_and_completions_keep_apart(here):
    events = events_of(here.complete(prompt=["w5", "w10"], n=2, stream=True, **GREEDY).text)
    texts, ends = [""] * 4, [0] * 4
    for one in events:
        choice = one["choices"][0]
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] += choice["finish_reason"] is not None
    assert texts == ["w6 w7 w8"] * 2 + ["w11 w12 w13"] * 2
    assert ends == [1] * 4


def test_prompt_cache_is_told_in_the_usage(here):
    body = {"prompt": " ".join(["w7"] * 40), "cache_salt": "test-usage", **GREEDY}
    cached = [here.complete(**body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
    assert cached == [0, 32]


def test_a_model_without_a_tokenizer_serves_ids(bare):
    with serving(bare) as running:
        choice = running.complete(prompt=[5], return_token_ids=True, logprobs=0, **GREEDY).json()["choices"][0]
        assert (choice["text"], choice["token_ids"]) == ("", [6, 7, 8])
        assert choice["logprobs"]["tokens"] == ["token_id:6", "token_id:7", "token_id:8"]
        refused = running.complete(prompt="w5")
    assert refused.status_code == 400 and "no tokenizer" in refused.json()["error"]["message"]
