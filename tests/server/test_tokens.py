"""`/tokenize`, `/detokenize`, `/v1/models`, `/health` and `/version`."""

from framework import __version__


def post(here, path, **body):
    return here.client.post(path, json=body)


def test_text_becomes_ids_with_the_tokenizers_own(here):
    told = post(here, "/tokenize", prompt="w5 w6", return_token_strs=True).json()
    assert told == {"count": 3, "max_model_len": 8192, "tokens": [1, 5, 6], "token_strs": ["<s>", "w5", "w6"]}
    assert post(here, "/tokenize", prompt="w5", add_special_tokens=False).json()["tokens"] == [5]


def test_messages_become_the_ids_of_a_chat(here):
    messages = [{"role": "user", "content": "w5"}]
    told = post(here, "/tokenize", messages=messages).json()["tokens"]
    assert told == here.chat(messages=messages, max_tokens=1, return_token_ids=True).json()["prompt_token_ids"]
    assert post(here, "/tokenize", messages=messages, add_generation_prompt=False).json()["tokens"] == told[:-1]


def test_ids_become_text(here):
    assert post(here, "/detokenize", tokens=[1, 5, 6]).json() == {"prompt": "<s> w5 w6"}


def test_what_is_neither_is_refused(here):
    for body, says in (
        ({}, "exactly one of prompt and messages"),
        ({"prompt": "a", "messages": []}, "exactly one"),
        ({"prompt": "a", "add_generation_prompt": True}, "belongs to messages"),
    ):
        response = post(here, "/tokenize", **body)
        assert response.status_code == 400 and says in response.json()["error"]["message"]
    outside = post(here, "/detokenize", tokens=[5, 24])
    assert outside.status_code == 400 and "tokens[1] is 24, outside the vocabulary 0..23" in outside.text


def test_one_model_is_listed(here):
    (card,) = here.client.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["created"], card["max_model_len"]) == ("small", "model", 1700000000, 8192)
    assert here.client.get("/v1/models/small").json() == card
    assert here.client.get("/v1/models/large").json()["error"]["code"] == "model_not_found"


def test_health_and_version(here):
    assert here.client.get("/health").json() == {"status": "ok"}
    assert here.client.get("/version").json()["version"] == __version__


def test_request_id_comes_back_and_stands_in_the_answers_id(here):
    answer = here.client.post("/v1/completions", json={"prompt": "w5"}, headers={"x-request-id": "mine-7"})
    assert answer.headers["x-request-id"] == "mine-7"
    assert answer.json()["id"].startswith("cmpl-mine-7-")
    first, second = (here.client.get("/health").headers["x-request-id"] for _ in range(2))
    assert first != second


def test_equal_request_ids_may_run_at_a_time(here):
    odd = {"x-request-id": "a b\tc/" + "d" * 200}
    for headers in (odd, {"x-request-id": "same"}, {"x-request-id": "same"}):
        answer = here.client.post("/v1/completions", json={"prompt": "w5", "max_tokens": 1}, headers=headers)
        assert answer.status_code == 200
