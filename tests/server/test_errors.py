"""Whatever is wrong about a request is answered in OpenAI's form, with the field it is about."""

import pytest

from framework.errors import RequestError
from framework.server.errors import ApiError, as_api_error


def error_of(response):
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"temprature": 1}, "temprature", "Did you mean 'temperature'?"),
        ({"temperature": -1}, "temperature", "at least 0, got -1"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"n": 0}, "n", "1..128"),
        ({"n": True}, "n", "valid integer"),
        ({"top_p": 0}, "top_p", "(0, 1]"),
        ({"max_tokens": 0}, "max_tokens", "needs echo=true"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens", "must not exceed"),
        ({"logit_bias": {"24": 1}}, "logit_bias", "outside the vocabulary"),
        ({"logit_bias": {"w5": 1}}, "logit_bias.w5", "integer"),
        ({"stop": [""]}, "stop", "empty string"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        ({"stream": True, "stream_options": {"usage": True}}, "usage", "no field 'usage'"),
        ({"suffix": "x"}, "suffix", "suffix is not served"),
        ({"best_of": 2}, "best_of", "use n"),
        ({"store": True}, "store", "no field 'store'"),
        ({"priority": 3}, "priority", "needs policy=priority"),
        ({"cache_salt": ""}, "cache_salt", "non-empty"),
        ({"stages": {"no_such": True}}, "stages", "no_such"),
        ({"prompt": ""}, "prompt", "the prompt is empty"),
        ({"prompt": []}, "prompt", "empty list"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": ["a", [1]]}, "prompt", "prompt must be a text"),
        ({"prompt": [24]}, "prompt", "prompt[0] is 24, outside the vocabulary 0..23"),
        ({"prompt": None}, "prompt", "prompt must be a text"),
    ],
)
def test_refused_field_is_named(here, body, param, says):
    response = here.complete(**{"prompt": "w5", **body})
    error = error_of(response)
    assert response.status_code == 400, response.text
    assert says in error["message"] and error["param"] == param
    assert error["type"] == "invalid_request_error" and "SamplingParams" not in error["message"]


def test_fields_without_an_effect_are_taken(here):
    body = {"user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "store": False, "suffix": None, "stop": None}
    assert here.complete(prompt="w5", max_tokens=1, **body).status_code == 200


def test_prompt_beyond_the_model_names_the_limit(here):
    response = here.complete(prompt=[5] * 8192)
    assert response.status_code == 400 and error_of(response)["code"] == "context_length_exceeded"
    assert "8192 tokens but engine.max_model_len is 8192" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("path", "as_body"),
    [
        ("/v1/completions", lambda text: {"prompt": text}),
        ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}),
        ("/v1/responses", lambda text: {"input": text}),
    ],
)
def test_text_is_refused_by_its_beginning_where_that_is_too_long_already(here, path, as_body):
    response = here.client.post(path, json=as_body("w5 " * 500_000))
    assert response.status_code == 400 and error_of(response)["code"] == "context_length_exceeded"
    assert "has more than 8192 tokens" in error_of(response)["message"]


def test_text_of_many_characters_and_few_tokens_is_served(here):
    response = here.complete(prompt="w5" + " " * 500_000 + "w6", max_tokens=1)
    assert response.status_code == 200 and response.json()["usage"]["prompt_tokens"] == 3


def test_one_bad_prompt_of_several_refuses_all_and_nothing_runs(here):
    before = here.stats()["num_steps"]
    assert here.complete(prompt=[[5], [24]], max_tokens=4).status_code == 400
    assert here.stats()["num_steps"] == before


def test_refusal_of_a_stream_is_no_stream(here):
    response = here.complete(prompt="w5", stream=True, logit_bias={"24": 1})
    assert response.status_code == 400 and error_of(response)["param"] == "logit_bias"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "not JSON"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b"[]", "must be a JSON object"),
        (b"", "must be a JSON object"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b'{"prompt": "w5", "seed": ' + b"1" * 5000 + b"}", "cannot be read as JSON"),
        (b'{"prompt": "w5", "temperature": NaN}', "got nan"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
    ],
)
def test_body_that_cannot_be_read_is_400(here, content, says):
    response = here.client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert says in error_of(response)["message"]


def test_body_that_is_not_sent_as_json_is_refused(here):
    response = here.client.post("/v1/completions", content=b'{"prompt": "w5"}', headers={"content-type": "text/plain"})
    assert response.status_code == 400 and "application/json" in error_of(response)["message"]


def test_unknown_path_method_and_model_have_their_codes(here):
    assert error_of(here.client.get("/v2/models"))["code"] == "not_found"
    wrong = here.client.get("/v1/completions")
    assert wrong.status_code == 405 and "use POST" in error_of(wrong)["message"]
    other = here.complete(model="large", prompt="w5")
    assert other.status_code == 404 and error_of(other)["code"] == "model_not_found"
    assert error_of(other)["message"] == "the model 'large' is not served here; this server has 'small'"


def test_head_is_answered_like_get_and_without_a_body(here):
    for path in ("/health", "/v1/models", "/"):
        asked, got = here.client.head(path), here.client.get(path)
        assert asked.status_code == 200 and not asked.content
        assert asked.headers["content-length"] == got.headers["content-length"]
    assert here.client.head("/v1/completions").status_code == 405


def test_fault_of_the_server_is_500_with_its_words_and_an_id(here, monkeypatch):
    def broken():
        raise KeyError("ours")

    monkeypatch.setattr(type(here.service.llm), "is_usable", property(lambda self: broken()))
    response = here.client.get("/health", headers={"x-request-id": "mine"})
    assert response.status_code == 500 and error_of(response)["code"] == "server_failure"
    assert "KeyError: 'ours'" in error_of(response)["message"] and response.headers["x-request-id"] == "mine"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ApiError(429, "busy"), 429),
        (RequestError("the prompt is empty"), 400),
        (TimeoutError(), 504),
        (RuntimeError("a step failed"), 500),
        (KeyError("ours"), 500),
        (TypeError("ours as well"), 500),
    ],
)
def test_status_follows_from_whose_fault_it_is(error, status):
    assert as_api_error(error).status == status
