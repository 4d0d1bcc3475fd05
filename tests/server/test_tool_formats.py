"""Which format a checkpoint has, what its prompts hold, and what constrains its calls."""

import json

import pytest

from framework.chat_template import ChatTemplate
from framework.errors import ConfigError, RequestError
from framework.interfaces import GrammarSpec
from framework.request import StructuredOutputsParams
from framework.server.tool_calls import FORMATS, ToolCall, is_forced, parser_for
from framework.structured.spec import spec_of

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "now"}}
ASKED = [{"role": "user", "content": "Rain in Rome?"}]
CALLED = [
    *ASKED,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function",
                        "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "dry"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "warm"}]},
]  # fmt: skip

# What the published templates of the families write for calls, and no more of them.
QWEN = """{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{{ '<tool_call>\\n{"name": "' }}"""
LLAMA = """{% if tools is not none %}Respond in the format {"name": function name, "parameters": dictionary of argument
 name and its value}.{% endif %}"""
MISTRAL = """{% if tools is not none %}[AVAILABLE_TOOLS]{% endif %}{{ "[TOOL_CALLS] [" }}"""
CODER = """{% for tool in tools %}{{ tool }}{% endfor %}<tool_call>\\n<function=f>\\n<parameter=p>\\n"""
GLM = """{% if tools %}<tool_call>{name}\\n<arg_key>{key}</arg_key>{% endif %}"""
BARE = "{% for m in messages %}<|im_start|>{{ m.role }}\\n{{ m.content }}<|im_end|>\\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "model_type", "name"),
    [
        (QWEN, "llama", "hermes"), (LLAMA, "llama", "llama3_json"), (MISTRAL, "llama", "mistral"),
        (CODER, "qwen3_moe", "qwen_xml"), ("{{ tools }}", "qwen3", "hermes"), ("{{ tools }}", "mistral", "mistral"),
        (BARE, "llama", "hermes"),
    ],
)  # fmt: skip
def test_format_is_that_of_the_template_and_then_of_the_model_type(template, model_type, name):
    assert parser_for(template, model_type).name == name


@pytest.mark.parametrize(("template", "model_type"), [(None, "qwen3"), (GLM, "glm4"), ("{{ tools }}", "llama")])
def test_there_is_no_format_where_none_is_known(template, model_type):
    assert parser_for(template, model_type) is None


def test_name_stands_over_what_the_template_shows():
    assert parser_for(QWEN, "qwen3", "mistral").name == "mistral"
    assert parser_for(GLM, "glm4", "hermes").name == "hermes"


def test_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"server.tool_format=herms: .*'hermes'.*Choices: .*llama3_json"):
        parser_for(QWEN, "qwen3", "herms")


# ------------------------------------------------------------------------------------------------------------- prompts


def test_template_that_knows_tools_gets_them_and_arguments_as_objects():
    messages, tools = parser_for(QWEN, "qwen3").prompt(CALLED, [WEATHER])
    assert tools == [WEATHER]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": {"city": "Rome"}}
    assert messages[1]["tool_calls"][0]["id"] == "call_1" and messages[2] == CALLED[2]


def test_arguments_that_are_no_object_are_refused_with_their_place():
    function = {"name": "now", "arguments": "[1]"}
    wrong = [*ASKED, {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}]
    with pytest.raises(RequestError, match=r"messages\[1\].tool_calls\[0\].function.arguments must be JSON of an obj"):
        parser_for(QWEN, "qwen3").prompt(wrong, [NOW])


def test_template_without_tools_gets_texts_alone():
    one = parser_for(BARE, "llama")
    messages, tools = one.prompt(CALLED, [WEATHER, NOW])
    assert tools is None
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert json.dumps(WEATHER["function"]) in messages[0]["content"]
    assert one.parse(messages[2]["content"]) == (None, [ToolCall("get_weather", '{"city": "Rome"}')])
    assert messages[3]["content"].count("<tool_response>") == 2 and "warm" in messages[3]["content"]
    assert "Weather of a city" in ChatTemplate(BARE).render(messages)


def test_system_message_of_the_caller_stays_before_ours():
    [first, _], _ = parser_for(BARE, "llama").prompt([{"role": "system", "content": "Be brief."}, *ASKED], [NOW])
    assert first["content"].startswith("Be brief.\n\nYou can call")


@pytest.mark.parametrize("name", FORMATS)
def test_description_of_ours_shows_calls_in_the_format_that_is_read(name):
    [first, _], _ = parser_for(BARE, "llama", name).prompt(ASKED, [NOW])
    example = first["content"].partition("looks like this:\n")[2].partition("\nThe result")[0]
    [call] = FORMATS[name].parse(example)[1]
    assert (call.name, json.loads(call.arguments)) == ("NAME", {"PARAMETER": "value"})


# --------------------------------------------------------------------------------------------------------- constraints


def constraint(tools, choice, parallel=True, name="hermes"):
    return FORMATS[name].constraint(tools, choice, parallel)


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_text_is_free_unless_a_call_is_asked_for(choice):
    assert constraint([WEATHER], choice) is None and not is_forced(choice)


def grammar(name):
    framework_grammars = pytest.importorskip(f"framework_grammars.{name}")
    from framework.interfaces import GrammarContext
    from framework_grammars.options import LLGuidanceOptions, XGrammarOptions

    tokens = [bytes([i]) for i in range(256)]
    ctx = GrammarContext(tokens=tokens, special_tokens={}, encode=lambda text: list(text.encode()))
    if name == "xgrammar":
        return framework_grammars.XGrammar(XGrammarOptions(), ctx)
    return framework_grammars.LLGuidance(LLGuidanceOptions(), ctx)


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def engine(request):
    return grammar(request.param)


def fits(engine, params, text):
    assert isinstance(params, StructuredOutputsParams)
    spec = spec_of(params)
    assert isinstance(spec, GrammarSpec)
    engine.check(spec)
    matcher = engine.compile(spec).matcher()
    return matcher.accept(list(text.encode())) and matcher.is_accepting()


ROME = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
TIME = '{"name": "now", "arguments": {}}'


@pytest.mark.parametrize(
    ("choice", "parallel", "good", "bad"),
    [
        ("required", True, f"[{ROME}, {TIME}]", "[]"),
        ("required", True, f"[{TIME}]", '[{"name": "get_weather", "arguments": {}}]'),
        ("required", False, ROME, f"[{ROME}]"),
        (NAMED, True, TIME, ROME),
        ("required", False, TIME, "Hello"),
    ],
)
def test_asked_for_calls_are_of_the_tools_and_fit_their_schemas(engine, choice, parallel, good, bad):
    params = constraint([WEATHER, NOW], choice, parallel)
    assert is_forced(choice) and fits(engine, params, good) and not fits(engine, params, bad)
    assert FORMATS["mistral"].parse(good, forced=True)[1]


def test_strict_tools_hold_to_their_schemas_in_any_text(engine):
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    for name in ("hermes", "llama3_json"):
        one = FORMATS[name]
        params = one.constraint([strict, NOW], "auto")
        good = one.write(one.parse(f"[{ROME}]", forced=True)[1])
        assert fits(engine, params, good) and not fits(engine, params, good.replace("city", "town"))
        assert fits(engine, params, "No call is needed.")


def test_strict_tools_are_refused_where_text_is_free_and_calls_are_no_text():
    strict = {"type": "function", "function": {"name": "now", "strict": True}}
    with pytest.raises(RequestError, match=r"strict=true .* written as mistral. Use tool_choice='required'"):
        constraint([strict], "auto", name="mistral")


def test_choice_of_no_tool_of_the_request_is_refused():
    wanted = {"type": "function", "function": {"name": "nwo"}}
    with pytest.raises(RequestError, match=r"names the function 'nwo', which is none of the tools. Did you mean 'now'"):
        constraint([WEATHER, NOW], wanted)
    with pytest.raises(RequestError, match="tool_choice='required' needs tools"):
        constraint([], "required")
