"""Calls in whole texts, in every format, and texts that are none. Streams are in `test_tool_streams`."""

import json

import pytest

from framework.server.tool_calls import FORMATS, ToolCall

F, G = ToolCall("f", '{"a": 1}'), ToolCall("g", "{}")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}},
        },
    }
]


def parse(name, text, **more):
    return FORMATS[name].parse(text, **more)


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', None, [F]),
        ("hermes", 'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "Let me see.", [F]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
                   '<tool_call>{"name": "g", "arguments": {}}</tool_call>', None, [F, G]),
        ("hermes", '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]</tool_call>',
         None, [F, G]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}} done</tool_call>', " done</tool_call>", [F]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> done', " done", [F]),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', None, [F]),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', None, [F]),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', None, [F, G]),
        ("llama3_json", '{"type": "function", "name": "f", "parameters": {"a": 1}}', None, [F]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', None,
         [F, G]),
        ("mistral", '[{"name": "f", "arguments": {"a": 1}}]', None, [F]),
        ("mistral", 'Well.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}', "Well.", [F, G]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', None, [F]),
        ("qwen_xml", "So:\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", "So:",
         [F]),
    ],
)  # fmt: skip
def test_calls_are_found(name, text, content, calls):
    assert parse(name, text, tools=TOOLS) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        '{"arguments": {"a": 1}, "name": "f"}',
        '{"name": "f", "arguments": "{\\"a\\": 1}"}',
        '{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}',
        '{"id": 3, "name": "f", "parameters": {"a": 1}, "more": [true, null, -1.5e3, "}"]}',
    ],
)
def test_call_may_be_spelled_in_other_ways(text):
    assert parse("hermes", f"<tool_call>{text}</tool_call>") == (None, [F])


def test_call_in_tags_may_have_no_arguments():
    assert parse("hermes", '<tool_call>{"name": "g"}</tool_call>') == (None, [G])


def test_answer_in_json_with_a_name_is_no_call():
    text = '{"name": "Bob", "age": 3}'
    assert parse("llama3_json", text) == (text, [])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "Two lines,\n and a brace { and a [ and a <tool.  \n",
        "",
        "  \n",
        "<tool_call>",
        "<tool_call>nothing</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "a b", "arguments": {}}</tool_call>',
        "<tool_call>[]</tool_call>",
        "[TOOL_CALLS]",
        "[TOOL_CALLS] f g",
        "[TOOL_CALLS] []",
        '<|python_tag|>print("x")',
        '{"name": "f", "parameters"',
        '{"name" "f"}',
        '[{"x": {"name": "f", "arguments": {"a": 1}}}]',
        "<tool_call><function=f><parameter=a>1</function></tool_call>",
        '<tool_call>{"name": "f", "arguments": 1' + 400 * "0" + "}</tool_call>",
        '<tool_call>{"name": "f", "x": 1e999, "arguments": "{\\"a\\": 1e999}"}</tool_call>',
    ],
)
def test_what_is_no_call_is_text_as_it_stands(name, text):
    assert parse(name, text) == (text, [])


def test_call_behind_one_that_was_none_is_found():
    call = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    assert parse("hermes", '<tool_call>{"name": ' + call) == ('<tool_call>{"name":', [G])


def test_arguments_that_break_stay_as_they_were_written():
    text = '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>\nSorry.'
    assert parse("hermes", text) == ("\nSorry.", [ToolCall("f", '{"a": oops}}')])


def test_arguments_that_are_cut_off_are_given_so_far():
    assert parse("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b') == (None, [ToolCall("f", '{"a": "b')])


def test_missing_last_brace_of_a_call_is_no_loss():
    assert parse("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>') == (None, [F])


def test_line_break_in_a_string_becomes_json():
    _, [call] = parse("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>')
    assert json.loads(call.arguments) == {"a": "x\ny"}


def test_marks_inside_of_arguments_are_arguments():
    arguments = json.dumps({"a": '</tool_call> <tool_call> {[\\" \u00e9'})
    assert parse("hermes", f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>') == (
        None,
        [ToolCall("f", arguments)],
    )


def test_values_in_xml_have_the_types_of_the_schema():
    text = "<tool_call><function=f><parameter=a>7</parameter><parameter=s>7</parameter></function></tool_call>"
    assert json.loads(parse("qwen_xml", text, tools=TOOLS)[1][0].arguments) == {"a": 7, "s": "7"}


def test_value_in_xml_that_does_not_fit_its_type_is_text():
    text = "<tool_call><function=f><parameter=a>many</parameter></function></tool_call>"
    assert json.loads(parse("qwen_xml", text, tools=TOOLS)[1][0].arguments) == {"a": "many"}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "f", "arguments": {"a": 1}}', [F]),
        ('[{"name": "f", "arguments": {"a": 1}},\n {"name": "g", "arguments": {}}]', [F, G]),
    ],
)
def test_forced_calls_are_bare_json_in_every_format(name, text, calls):
    assert parse(name, text, forced=True) == (None, calls)


@pytest.mark.parametrize("text", ["<think>{ [ so </think>", ""])
def test_forced_calls_stand_behind_the_reasoning_or_alone(text):
    call = '{"name": "f", "arguments": {"a": 1}}'
    found = FORMATS["hermes"].parse(text + "\n\n" + call, forced=True, reasoning_end="</think>")
    assert found == (text or None, [F])


def test_without_parallel_calls_the_first_is_given():
    text = '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
    assert parse("hermes", text, forced=True, parallel=False) == (None, [F])


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_as_they_are_written(name):
    one = FORMATS[name]
    assert one.parse(one.write([F, ToolCall("g", '{"x": "y"}')]), tools=TOOLS) == (
        None,
        [F, ToolCall("g", '{"x": "y"}')],
    )


def test_ids_are_new_and_of_the_form_that_templates_take():
    assert FORMATS["hermes"].new_id().startswith("call_")
    assert len({FORMATS["hermes"].new_id() for _ in range(50)}) == 50
    assert len(FORMATS["mistral"].new_id()) == 9 and FORMATS["mistral"].new_id().isalnum()
