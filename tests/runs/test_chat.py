"""`run=chat`: what is typed, what is answered, what the commands do, and what an interrupt ends."""

import io
import json
import os
import signal
from contextlib import suppress

import pytest

from framework import LLM
from framework.errors import ConfigError
from framework.runs import Incomplete, RunArgs, chat
from framework.runs.chat import Chat
from framework.runs.chat_input import ChatInput
from framework.runs.conversation import Conversation

SMALL = ("engine.dtype=float32", "engine.max_model_len=200", "scheduler.max_num_seqs=4", "kv_cache.num_blocks=64")
GREEDY = ("sampler.temperature=0",)
SAYS = "Aé漢."


@pytest.fixture(scope="module")
def llm(talker):
    with LLM(talker, overrides=[*SMALL, *GREEDY]) as llm:
        yield llm


@pytest.fixture
def talk(llm, capsys, tmp_path, monkeypatch):
    """Says lines to a chat: (stdout, stderr, conversation)."""
    monkeypatch.chdir(tmp_path)

    def say(*lines, system=None, template=None):
        conversation = Conversation(llm.engine, template or {}, system)
        chat = Chat(llm.engine, conversation, ChatInput(io.StringIO("".join(f"{line}\n" for line in lines))))
        with suppress(Incomplete):
            chat.run()
        out, err = capsys.readouterr()
        assert not llm.engine.has_unfinished_requests()
        return out, err, conversation

    return say


def test_each_line_of_a_pipe_is_answered_in_a_line_of_stdout(command):
    result = command("chat", *GREEDY, input=b"hi\n\n  \nho")
    assert (result.returncode, result.stdout.decode()) == (0, f"{SAYS}\n{SAYS}\n")
    assert b"Traceback" not in result.stderr and b"> " not in result.stderr


def test_prompt_is_said_first_and_the_model_sees_system_and_history(llm, talk, monkeypatch):
    seen = []
    monkeypatch.setattr(type(llm.engine), "add_request", _noting(type(llm.engine).add_request, seen))
    conversation = Conversation(llm.engine, {"mark": "!"}, "be good")
    Chat(llm.engine, conversation, ChatInput(io.StringIO("two\n"))).run("one")
    assert seen == [
        "system: be good!\nuser: one!\n",
        f"system: be good!\nuser: one!\nassistant: {SAYS}!\nuser: two!\n",
    ]


def _noting(add_request, seen):
    def noting(self, request_id, prompt, params=None):
        seen.append(prompt.text)
        return add_request(self, request_id, prompt, params)

    return noting


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["one\\", "two"], "one\ntwo"),
        (['"""one', "", '  two"""'], "one\n\n  two"),
        (['"""', "one", '"""'], "one"),
        (['"""one line"""'], "one line"),
        (["//reset"], "/reset"),
        (["one\\"], "one\n"),
        (['"""never closed'], "never closed"),
        (["漢字 é 🙂"], "漢字 é 🙂"),
    ],
)
def test_message_may_have_several_lines(talk, lines, text):
    conversation = talk(*lines)[2]
    assert conversation.messages[0]["content"].rstrip("\n") == text.rstrip("\n")
    assert conversation.messages[1]["content"] == SAYS


def test_answer_without_a_limit_of_its_own_may_fill_the_context(talk, llm):
    out, err, _ = talk("/params ignore_eos=true", "hi")
    assert len(out) > 16 and "engine.max_model_len=200; /reset begins anew" in err


def test_message_that_is_refused_leaves_the_conversation_as_it_was(talk):
    out, err, conversation = talk("x" * 300, "hi")
    assert "error: the prompt has 30" in err and "engine.max_model_len is 200" in err
    assert [m["content"] for m in conversation.messages] == ["hi", SAYS]
    assert out == f"{SAYS}\n"


def test_line_that_is_no_utf8_is_refused_and_the_chat_goes_on(llm, capsys):
    stdin = io.TextIOWrapper(io.BytesIO(b"a\xff\nhi\n"), encoding="utf-8")
    with pytest.raises(Incomplete, match=r"^1 of the messages"):
        Chat(llm.engine, Conversation(llm.engine, {}), ChatInput(stdin)).run()
    out, err = capsys.readouterr()
    assert out == f"{SAYS}\n"
    assert "error: the message is not UTF-8: byte 0xff; send it as UTF-8\n" in err


def test_params_change_the_next_answer_and_wrong_ones_change_nothing(talk):
    wrong = ["max_tokens=0", "max_tokns=3", "n=2", "x", "max_tokens="]
    lines = ["/params max_tokens=1", "hi", *(f"/params {word}" for word in wrong), "ho", "/params reset", "again"]
    out, err, _ = talk(*lines)
    assert out == f"A\nA\n{SAYS}\n"
    assert "max_tokens=1; /params max_tokens=NUMBER changes it" in err
    for message in ("max_tokens must be at least 1, got 0", "Did you mean 'max_tokens'", "n is fixed in a chat",
                    "x: write NAME=VALUE", "max_tokens=: a value is missing. Write max_tokens=VALUE"):  # fmt: skip
        assert message in err
    assert "params: temperature=0.0, max_tokens=null (as many as fit)" in err


def test_reset_forgets_messages_and_keeps_the_system_message(talk):
    _, _, conversation = talk("/system be good", "hi", "/reset", "ho")
    assert [m["content"] for m in conversation.all_messages()] == ["be good", "ho", SAYS]
    assert talk("/system x", "/system off", "/system")[2].system is None


def test_retry_answers_the_last_message_again(talk):
    out, err, conversation = talk("/retry", "hi", "/retry")
    assert "/retry: there is no answer yet" in err
    assert out == f"{SAYS}\n{SAYS}\n"
    assert [m["content"] for m in conversation.messages] == ["hi", SAYS]


def test_saved_conversation_is_a_line_of_a_prompts_file_and_can_be_loaded(talk, tmp_path):
    talk("/system s", "hi", "/save talk.json", "ho", "/save talk.json")
    (line,) = (tmp_path / "talk.json").read_text(encoding="utf-8").splitlines()
    assert [m["role"] for m in json.loads(line)["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    _, _, conversation = talk("/load talk.json")
    assert (conversation.system, len(conversation.messages)) == ("s", 4)


@pytest.mark.parametrize("bad", ["/loda", "/save", "/params x", "/retry", "/exit now", "x" * 300])
def test_pipe_whose_line_failed_says_how_many_and_the_rest_is_answered(llm, capsys, bad):
    source = ChatInput(io.StringIO(f"{bad}\nhi\n"))
    with pytest.raises(Incomplete, match=r"^1 of the messages and commands failed; they are named above"):
        Chat(llm.engine, Conversation(llm.engine, {}), source).run()
    out, err = capsys.readouterr()
    assert out == f"{SAYS}\n" and err.startswith("error: ")
    source = ChatInput(io.StringIO(f"{bad}\nhi\n"))
    source.is_terminal = True
    Chat(llm.engine, Conversation(llm.engine, {}), source).run()  # whoever sits there has seen it


def test_conversation_that_fills_the_context_is_told_how_to_go_on(talk):
    _, err, _ = talk("hi", "x" * 300)
    assert "engine.max_model_len is 200" in err and err.rstrip().endswith("/reset forgets the conversation")


def test_path_that_is_taken_for_a_command_can_be_said(talk):
    _, err, conversation = talk("/usr/bin is what?", "//usr/bin is what?")
    assert "/usr/bin: there is no such command. Write //usr/bin to say it." in err
    assert conversation.messages[0]["content"] == "/usr/bin is what?"


def test_files_that_do_not_fit_are_refused_by_name(talk, tmp_path):
    (tmp_path / "other.json").write_text("precious")
    _, err, _ = talk("/save other.json", "/save", "/load nowhere", "/load other.json", "/save no/such/place", "/loda")
    assert (tmp_path / "other.json").read_text() == "precious"
    for message in ("there is a file of that name; name another", "/save: name a file", "/load nowhere: No such file",
                    "/load other.json: Expecting value", "/save no/such/place: No such file",
                    "/loda: there is no such command. Did you mean '/load'?"):  # fmt: skip
        assert message in err


def test_exit_leaves_and_help_lists_every_command(talk):
    out, err, conversation = talk("/help", "/exit", "hi")
    assert (out, conversation.messages) == ("", [])
    for name in ("/help", "/reset", "/retry", "/system", "/params", "/save", "/load", "/exit"):
        assert f"  {name}" in err


@pytest.mark.parametrize(
    ("words", "args", "message"),
    [
        ([], RunArgs(output="o"), "output=o means nothing to run=chat; the command /save"),
        ([], RunArgs(prompts_file="p"), "prompts_file=p means nothing to run=chat"),
        ([], RunArgs(target="t"), "target=t means nothing to run=chat"),
        (["sampler.detokenize=false"], RunArgs(), "sampler.detokenize=false: a chat is made of text"),
    ],
)
def test_what_makes_no_chat_is_refused(talker, words, args, message):
    from framework.config import compose

    with pytest.raises(ConfigError, match=message):
        chat.run(compose([f"model.path={talker}", *SMALL, *words]), args)


def test_terminal_shows_each_character_once_and_ctrl_d_leaves(terminal):
    screen = terminal("chat", *GREEDY)
    screen.wait_for("loading ")
    screen.wait_for("> ")
    screen.type("é漢\r")
    assert screen.wait_for("> ") == f"é漢\n{SAYS}\n"
    screen.type("\x04")
    assert screen.exit_code() == 0
    assert screen.shown.count("/help lists the commands") == 1 and "\ufffd" not in screen.shown
    assert "Traceback" not in screen.shown


def test_interrupt_stops_the_answer_and_not_the_program(terminal):
    screen = terminal("chat", *GREEDY, "sampler.ignore_eos=true", slow=0.05)
    screen.wait_for("> ")
    screen.type("hi\r")
    screen.wait_for(SAYS * 2)
    screen.type("\x03")
    screen.wait_for("(stopped)")
    screen.wait_for("> ")
    screen.type("/params ignore_eos=false\r")
    screen.wait_for("params: ")
    screen.wait_for("> ")
    screen.type("ho\r")
    assert screen.wait_for("> ") == f"ho\n{SAYS}\n"
    screen.type("/save talk.json\r")
    screen.wait_for("(saved to talk.json)")
    screen.type("/exit\r")
    assert screen.exit_code() == 0


def test_stopped_answer_is_kept_without_half_a_character(llm, capsys, monkeypatch):
    steps, step = [], type(llm.engine).step

    def interrupted_in_the_fifth(self):  # which makes the first of the three bytes of its character
        steps.append(step(self))
        if len(steps) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return steps[-1]

    monkeypatch.setattr(type(llm.engine), "step", interrupted_in_the_fifth)
    conversation, source = Conversation(llm.engine, {}), ChatInput(io.StringIO(""))
    source.is_terminal = True
    Chat(llm.engine, conversation, source).run("hi")
    assert capsys.readouterr().out == "Aé\n"
    assert conversation.messages[1] == {"role": "assistant", "content": "Aé"}
    assert not llm.engine.has_unfinished_requests()


def test_second_interrupt_at_the_prompt_leaves(terminal):
    screen = terminal("chat", *GREEDY)
    screen.wait_for("> ")
    screen.type("half a li")
    # A Ctrl-C drops what the terminal has not handed over: readline, called for it, would wait for the next key.
    screen.wait_for("half a li")
    screen.wait_for("(Ctrl-C again, Ctrl-D or /exit leaves)", lambda: screen.type("\x03"))
    screen.wait_for("> ")
    screen.type("hi\r")
    assert screen.wait_for("> ") == f"hi\n{SAYS}\n"  # what was typed in between counts from the beginning
    screen.wait_for("leaves)", lambda: screen.type("\x03"))
    screen.wait_for("> ")
    screen.wait_for("interrupted", lambda: screen.type("\x03"))
    assert screen.exit_code() == 130


def test_sigterm_leaves_at_once(terminal):
    screen = terminal("chat", *GREEDY)
    screen.wait_for("> ")
    screen.wait_for("interrupted", lambda: os.kill(screen.pid, signal.SIGTERM))
    assert screen.exit_code() == 143
    assert "Traceback" not in screen.shown
