"""Forms of prompts, and that all of them are checked before any runs."""

import numpy as np
import pytest
import torch

from framework import LLM, SamplingParams
from framework.errors import NotBuiltError, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=3)


def ids(outputs):
    return [o.outputs[0].token_ids for o in outputs]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("w4 w5", [[6, 7, 8]]),
        ([4, 5], [[6, 7, 8]]),
        ({"prompt": "w4 w5"}, [[6, 7, 8]]),
        ({"prompt_token_ids": [4, 5]}, [[6, 7, 8]]),
        ({"prompt_token_ids": (4, 5), "cache_salt": "x", "priority": 0, "lora": None}, [[6, 7, 8]]),
        ([[4, 5]], [[6, 7, 8]]),
        (["w4", [5], {"prompt": "w6"}, {"prompt_token_ids": [7]}], [[5, 6, 7], [6, 7, 8], [7, 8, 9], [8, 9, 10]]),
        ([], []),
    ],
)
def test_every_form_of_prompt_gives_a_list_in_input_order(chain, prompts, expected):
    assert ids(chain.generate(prompts, GREEDY, use_tqdm=False)) == expected


@pytest.mark.parametrize("make", [np.array, torch.tensor, lambda ids: [np.int64(i) for i in ids]])
def test_array_of_ids_with_one_dimension_is_one_prompt(chain, make):
    outputs = chain.generate([make([4, 5]), {"prompt_token_ids": make([6])}], GREEDY)
    outputs += chain.generate(make([4, 5]), GREEDY)
    assert ids(outputs) == [[6, 7, 8], [7, 8, 9], [6, 7, 8]]
    assert all(type(i) is int for output in outputs for i in output.prompt_token_ids)


def test_array_of_ids_with_two_dimensions_holds_a_prompt_a_row(chain):
    assert ids(chain.generate(np.array([[4, 5], [5, 6]]), GREEDY)) == [[6, 7, 8], [7, 8, 9]]


def test_text_gets_the_special_tokens_of_the_tokenizer_and_ids_get_none(chain):
    text, tokens = chain.generate(["w4 w5", [4, 5]], GREEDY)
    assert (text.prompt, text.prompt_token_ids) == ("w4 w5", [1, 4, 5])
    assert (tokens.prompt, tokens.prompt_token_ids) == (None, [4, 5])


def test_chat_renders_the_template_and_adds_no_special_tokens(chain):
    messages = [{"role": "user", "content": "w7"}]
    (one,) = chain.chat(messages, GREEDY, use_tqdm=False)
    assert one.prompt == "w5 w7 w9"
    assert one.prompt_token_ids == [5, 7, 9]
    assert ids(chain.chat([messages, messages], GREEDY)) == [[10, 11, 12]] * 2
    assert chain.chat([], GREEDY) == []


def test_one_sampling_params_serves_all_and_a_list_serves_each(chain):
    each = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 2)]
    assert ids(chain.generate([[4], [5]], each)) == [[5], [6, 7]]
    with pytest.raises(ValueError, match="2 sampling_params for 3 prompts"):
        chain.generate([[4], [5], [6]], each)


@pytest.mark.parametrize(
    ("bad", "kind", "message"),
    [
        ([], ValueError, "the prompt is empty"),
        ("", ValueError, "the prompt is empty"),
        ({"prompt": ""}, ValueError, "the prompt is empty"),
        ({"prompt_token_ids": []}, ValueError, "the prompt is empty"),
        ([4, 24], ValueError, r"prompt_token_ids\[1\] is 24, outside the vocabulary 0..23"),
        ([-1], ValueError, r"prompt_token_ids\[0\] is -1, outside"),
        ([4, 5.0], TypeError, r"prompt_token_ids\[1\] must be an integer, got 5.0"),
        ([True], TypeError, r"prompt_token_ids\[0\] must be an integer, got True"),
        ([4] * 64, ValueError, "the prompt has 64 tokens but engine.max_model_len is 64"),
        (np.array([4.0]), TypeError, r"prompt_token_ids\[0\] must be an integer, got 4.0"),
        (torch.tensor([True]), TypeError, r"prompt_token_ids\[0\] must be an integer, got True"),
        (np.array([[4]]), TypeError, r"must be a string or a list of token ids, got a list that begins with \[4\]"),
        (7, TypeError, "a prompt must be a string, a list of token ids or a dict, got int"),
        (None, TypeError, "got NoneType"),
        ({}, ValueError, "needs exactly one of prompt, prompt_token_ids; got none"),
        ({"prompt": "w4", "prompt_token_ids": [4]}, ValueError, "exactly one"),
        ({"prompt": [4]}, TypeError, "prompt must be a string"),
        ({"prompt_token_ids": "w4"}, TypeError, "prompt_token_ids must be a list of ids"),
        ({"prompt": "w4", "cache_sal": "x"}, ValueError, r"no key 'cache_sal'. Did you mean 'cache_salt'\?"),
        ({"prompt": "w4", "cache_salt": ""}, ValueError, "cache_salt must be a non-empty string"),
        ({"prompt": "w4", "priority": True}, TypeError, "priority must be an integer"),
        ({"prompt": "w4", "priority": -1}, ValueError, "priority=-1 needs policy=priority, but policy=fcfs"),
        ({"prompt": "w4", "lora": "a"}, NotBuiltError, "lora is not built yet"),
        ({"prompt_embeds": [[0.0]]}, NotBuiltError, "prompt_embeds is not built yet"),
        ("\ud800", ValueError, "not valid Unicode"),
    ],
)
def test_bad_prompt_names_its_index_and_nothing_has_run(chain, bad, kind, message):
    before = chain.engine.stats()
    with pytest.raises(kind, match=f"(?s)prompt 1: .*{message}"):
        chain.generate([[4], bad, [5]], GREEDY)
    assert chain.engine.stats() == before
    assert not chain.engine.has_unfinished_requests()
    assert ids(chain.generate([4], GREEDY)) == [[5, 6, 7]]


def test_prompt_that_cannot_fit_in_the_pool_alone_is_refused_with_its_index(folders):
    with LLM(folders["chain"], overrides=["engine.max_model_len=64", "kv_cache.num_blocks=3"]) as llm:
        before = llm.engine.stats()
        with pytest.raises(RequestError, match=r"prompt 1: .*40 tokens and need 3 blocks, but the pool has 2"):
            llm.generate([[4], [4] * 30], [GREEDY, SamplingParams(max_tokens=10)])
        assert llm.engine.stats() == before
        assert ids(llm.generate([[4] * 29], GREEDY)) == [[5, 6, 7]]


@pytest.mark.parametrize(
    ("messages", "kind", "message"),
    [
        ({"role": "user", "content": "w4"}, TypeError, "messages must be a list of dicts"),
        ("w4", TypeError, "messages must be a list of dicts"),
        ([[{"role": "user", "content": "w4"}], "w4"], TypeError, "conversation 1: messages must be a list of dicts"),
        ([[{"role": "user", "content": "w4"}], []], ValueError, "conversation 1: the list of messages is empty"),
        ([{"role": "user", "content": "w4 " * 70}], ValueError, "conversation 0: the prompt has 72 tokens"),
    ],
)
def test_bad_conversation_names_its_index_and_nothing_has_run(chain, messages, kind, message):
    before = chain.engine.stats()
    with pytest.raises(kind, match=message):
        chain.chat(messages, GREEDY)
    assert chain.engine.stats() == before


FINE = {"role": "user", "content": "w4"}


@pytest.mark.parametrize(
    ("message", "kind", "text"),
    [
        (5, TypeError, "must be a dict with role and content, got 5"),
        ({"content": "w4"}, RequestError, "has no role; write {'role': 'user', 'content': 'text'}"),
        ({"role": "user"}, RequestError, "has no content; write {'role': 'user', 'content': 'text'}"),
        ({"role": None, "content": "w4"}, TypeError, ": role must be a string, got None"),
        ({"role": "user", "content": 5}, TypeError, ": content must be a string, got 5"),
        ({"role": "user", "content": None}, NotBuiltError, ": content=None is not built yet"),
        (
            {"role": "user", "content": [{"type": "text", "text": "w4"}]},
            NotBuiltError,
            ": content as a list of parts is not built yet; write the content as one string",
        ),
    ],
)
def test_bad_message_is_refused_by_its_place_before_a_template_sees_it(chain, message, kind, text):
    for messages, index in (([FINE, message], 0), ([[FINE], [FINE, message]], 1)):
        with pytest.raises(kind) as caught:
            chain.chat(messages, GREEDY)
        assert str(caught.value).startswith(f"conversation {index}: messages[1]")
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"add_generation_prompt": False}, ValueError, r"not hold 'add_generation_prompt': pass it as chat\(add_gen"),
        ({"messages": []}, ValueError, r"not hold 'messages': pass it as chat\(messages="),
        ("enable_thinking", TypeError, "chat_template_kwargs must map names to values, got 'enable_thinking'"),
        ({5: True}, TypeError, r"chat_template_kwargs must map names to values, got {5: True}"),
    ],
)
def test_chat_template_kwargs_hold_names_that_the_template_alone_reads(chain, options, kind, message):
    with pytest.raises(kind, match=message):
        chain.chat([FINE], GREEDY, chat_template_kwargs=options)


@pytest.mark.parametrize(("prompts", "params", "message"), [
    (b"w4", GREEDY, "prompt 0: a prompt must be a string, a list of token ids or a dict, got bytes"),
    (7, GREEDY, "prompts must be a prompt or a list of prompts, got int"),
    ([[4]], {"temperature": 0}, "sampling_params must be a SamplingParams or a list of them, got dict"),
    ([[4]], [{"temperature": 0}], "prompt 0: sampling_params must be a SamplingParams, got dict"),
])  # fmt: skip
def test_argument_of_a_wrong_type_is_a_type_error(chain, prompts, params, message):
    with pytest.raises(TypeError, match=message):
        chain.generate(prompts, params)


@pytest.fixture(scope="module")
def bare(folders):
    with LLM(folders["bare"], overrides=["engine.max_model_len=64"]) as llm:
        yield llm


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0, max_tokens=3, detokenize=False), None])
def test_folder_without_a_tokenizer_serves_token_ids_without_text(bare, params):
    (output,) = bare.generate([4, 5], params)
    assert output.outputs[0].text == ""
    assert output.outputs[0].token_ids


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate("w4", GREEDY), "prompt 0: the model has no tokenizer.*prompt_token_ids"),
        (lambda llm: llm.generate([4], SamplingParams(detokenize=True)), "detokenize=True needs a tokenizer"),
        (lambda llm: llm.chat([{"role": "user", "content": "a"}], GREEDY), "conversation 0: messages need a chat"),
    ],
)
def test_folder_without_a_tokenizer_refuses_what_needs_one(bare, call, message):
    with pytest.raises(RequestError, match=message):
        call(bare)


def test_list_of_prompts_for_one_prompt_is_named(mixed):
    wanted = r"a prompt must be a string or a list of token ids, got a list that begins with {}; give each"
    with pytest.raises(TypeError, match=wanted.format("'w4'")):
        mixed.engine.add_request("a", ["w4", "w5"])
    with pytest.raises(TypeError, match="prompt 1: " + wanted.format(r"\[4\]")):
        mixed.generate([[4], [[4], [5]]])


def test_progress_may_be_the_third_argument_and_is_a_flag(mixed):
    params = SamplingParams(temperature=0, max_tokens=1)
    assert mixed.generate([[4]], params, False)[0].finished
    assert mixed.chat([{"role": "user", "content": "w4"}], params, False)[0].finished
    with pytest.raises(TypeError, match=r"use_tqdm must be True, False or None, got 'lora'"):
        mixed.generate([[4]], params, "lora")
