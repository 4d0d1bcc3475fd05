"""A load against a stand-in server: moments, tokens and errors come out as the server made them.

Bounds of times are those that hold on a machine of any speed: a wait of the server is a least, never a most.
"""

import asyncio
from itertools import pairwise

import pytest

from framework.errors import ConfigError
from framework.runs.bench.serve.arrivals import moments, unit_gaps
from framework.runs.bench.serve.client import Client, Outcome, cut, key_from
from framework.runs.bench.serve.drive import Point, drive
from framework.runs.bench.serve.figures import chunk_sizes, latency_of, measure
from framework.runs.bench.serve.options import LoadOptions
from framework.runs.bench.serve.prompts import Prompts
from framework.runs.bench.serve.wire import read_event


def met(server, options, key=None):
    """(client that has met the server, requests)."""
    client, asks = Client(options, server.url, key), Prompts(options, salt=1).asks(1)

    async def meet():
        async with client.session() as session:
            await client.meet(session, cut(asks[0], 2))

    asyncio.run(meet())
    server.bodies.clear()
    server.moments.clear()
    return client, asks


def driven(server, options, due=None, concurrency=None, advance=lambda done: None, max_s=None):
    client, asks = met(server, options)
    return asyncio.run(drive(client, asks, due, concurrency, max_s, advance))


def figures(point, slo=None, late=1e9):
    return measure(point, {"rate": 1.0}, slo or {}, {}, late)


def options(server, **keys):
    return LoadOptions(url=server.url, **{"num_prompts": 6, "input_len": 5, "output_len": 4, **keys})


def test_waits_of_the_server_are_in_ttft_and_between_chunks(stand_in):
    stand_in.first_s, stand_in.gap_s = 0.05, 0.02
    point = driven(stand_in, options(stand_in), concurrency=2)
    for outcome in point.outcomes:
        one = latency_of(outcome)
        assert one.ttft >= 50 and len(one.gaps) == 3 and one.tokens == 4
        # A chunk may be read late and the next one in time: single gaps have no least, their sum has nearly one.
        assert one.e2e >= 50 + 3 * 20 and one.e2e >= one.ttft + sum(one.gaps) - 1e-6
        assert one.tpot == pytest.approx(sum(one.gaps) / 3)


def test_figures_count_what_was_answered(stand_in):
    point = driven(stand_in, options(stand_in), concurrency=3)
    one = figures(point)
    seconds = one.figures["whole point"]
    assert one.figures["requests"] * seconds == pytest.approx(6)
    assert one.figures["output tokens"] * seconds == pytest.approx(24)
    assert one.figures["all tokens"] * seconds == pytest.approx(24 + 6 * 7)
    assert one.figures["cached share of the prompts"] == pytest.approx(3 / 7)
    assert one.figures["errors"] == one.figures["cut off"] == 0 and one.counted_by == "usage" and one.errors == {}
    assert one.figures["TTFT, p50"] <= one.figures["TTFT, p90"] <= one.figures["TTFT, p99"]


def test_tokens_of_a_chunk_come_from_usage(stand_in):
    stand_in.chunk_tokens = 3
    point = driven(stand_in, options(stand_in, output_len=7, usage_per_chunk=True), concurrency=1)
    assert [chunk_sizes(one) for one in point.outcomes] == [[3.0, 3.0, 1.0]] * 6
    point = driven(stand_in, options(stand_in, output_len=7), concurrency=1)
    assert chunk_sizes(point.outcomes[0]) == pytest.approx([7 / 3] * 3)
    assert figures(point).figures["tokens of a chunk, mean"] == pytest.approx(7 / 3)


def test_chunks_are_counted_where_the_server_tells_no_usage(stand_in):
    stand_in.tells_usage = False
    one = figures(driven(stand_in, options(stand_in), concurrency=1))
    assert one.counted_by == "chunks" and "all tokens" not in one.figures
    assert one.figures["output tokens"] * one.figures["whole point"] == pytest.approx(24)


def test_first_token_of_a_chat_is_not_the_role(stand_in):
    stand_in.first_s = 0.05
    point = driven(stand_in, options(stand_in, api="chat"), concurrency=6)
    assert all(latency_of(one).ttft >= 50 and len(one.chunks) == 4 for one in point.outcomes)
    assert stand_in.bodies[0]["messages"][0]["role"] == "user"


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("cut", "broken stream"), ("no end", "broken stream"), ("error", "error in the stream"), ("refused", "HTTP 429"),
     ("no event", "bad event"), ("no stream", "no stream")],
)  # fmt: skip
def test_fault_of_an_answer_is_an_error_of_its_request_alone(stand_in, fault, kind):
    load = options(stand_in)
    client, asks = met(stand_in, load)
    stand_in.faults = {1: fault, 4: fault}
    one = figures(asyncio.run(drive(client, asks, None, 1, None, lambda done: None)))
    assert one.errors == {kind: 2} and one.messages[kind] and one.figures["errors"] == 2
    assert one.figures["requests"] * one.figures["whole point"] == pytest.approx(4)
    assert len(one.samples["TTFT"]) == 4


def test_server_that_is_gone_is_an_error_of_each_request(stand_in):
    client, asks = met(stand_in, options(stand_in))
    client._url = "http://127.0.0.1:1"
    one = figures(asyncio.run(drive(client, asks, None, 6, None, lambda done: None)))
    assert one.errors == {"no connection": 6} and one.figures["requests"] == 0 and "TTFT, p50" not in one.figures


def test_request_beyond_its_time_is_a_timeout(stand_in):
    client, asks = met(stand_in, options(stand_in, request_timeout_s=0.2))
    stand_in.first_s = 5.0
    one = figures(asyncio.run(drive(client, asks, None, 6, None, lambda done: None)))
    assert one.errors == {"timeout": 6}


def test_closed_loop_keeps_so_many_requests_under_way(stand_in):
    stand_in.gap_s = 0.02
    point = driven(stand_in, options(stand_in, num_prompts=9), concurrency=3)
    assert len(point.outcomes) == 9 and stand_in.most_open == 3


def test_open_loop_sends_each_request_when_it_is_due_and_not_before(stand_in):
    stand_in.first_s = 0.2  # longer than the gaps: nobody waits for an answer
    due = moments(unit_gaps("constant", 1.0, 6, 0), 50.0)
    point = driven(stand_in, options(stand_in), due=due)
    sent = {one.index: one.sent - point.start for one in point.outcomes}
    assert all(sent[index] >= due[index] for index in range(6))
    assert [sent[index] for index in range(6)] == sorted(sent.values())
    assert stand_in.most_open > 1


def test_every_request_of_a_load_is_sent_once_with_its_own_prompt_and_seed(stand_in):
    load = options(stand_in, sampling={"temperature": 0}, seed=10)
    client, asks = met(stand_in, load)
    asyncio.run(drive(client, asks, [0.0] * 6, None, None, lambda done: None))
    prompts = sorted(body["prompt"] for body in stand_in.bodies)
    assert prompts == sorted(list(ask.token_ids) for ask in asks)
    assert sorted(body["seed"] for body in stand_in.bodies) == list(range(10, 16))
    assert all(body["temperature"] == 0 and body["model"] == "stand-in" for body in stand_in.bodies)


def test_time_that_is_up_cuts_off_what_is_under_way(stand_in):
    stand_in.first_s = 30.0
    client, asks = met_quickly(stand_in)
    point = asyncio.run(drive(client, asks, None, 2, 0.2, lambda done: None))
    assert point.num_cut == 6 and point.outcomes == [] and point.interrupt is None
    assert figures(point).figures["cut off"] == 6 and point.end - point.start < 20


def met_quickly(server):
    """A client that met the server before it became slow."""
    first, server.first_s = server.first_s, 0.0
    client, asks = met(server, options(server))
    server.first_s = first
    return client, asks


def test_interrupt_keeps_what_was_answered(stand_in):
    client, asks = met(stand_in, options(stand_in))
    stand_in.faults, stand_in.gap_s = {}, 0.01
    seen = []

    def advance(done):
        seen.append(done)
        if sum(seen) >= 2:
            raise KeyboardInterrupt(15)

    point = asyncio.run(drive(client, asks, None, 1, None, advance))
    assert point.interrupt.args == (15,)
    assert 2 <= len(point.outcomes) < 6 and point.num_cut == 6 - len(point.outcomes)


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("refuses", [(), ("ignore_eos",), ("stream_options",), ("ids", "ignore_eos", "stream_options")])
def test_dialect_is_what_the_server_takes(stand_in, refuses, api):
    stand_in.refuses = refuses
    client, _ = met(stand_in, options(stand_in, api=api))
    assert client.model == "stand-in"
    assert client.dialect.ids == (api == "completions" and "ids" not in refuses)
    assert client.dialect.ignore_eos == ("ignore_eos" not in refuses)
    assert client.dialect.usage == ("stream_options" not in refuses)


def test_server_that_takes_no_request_is_an_error_with_its_reason(stand_in):
    stand_in.refuses = ("model",)
    with pytest.raises(ConfigError, match=r"HTTP 400: model is not known here.*Correct bench.model"):
        met(stand_in, options(stand_in))


def test_ids_that_were_asked_for_are_not_given_up(stand_in):
    stand_in.refuses = ("ids",)
    with pytest.raises(ConfigError, match="ids is not known here"):
        met(stand_in, options(stand_in, prompts="ids"))


def test_address_without_a_server_is_an_error_that_names_it(stand_in):
    client = Client(LoadOptions(url="http://127.0.0.1:1"), "http://127.0.0.1:1", None)

    async def meet():
        async with client.session() as session:
            await client.meet(session, None)

    with pytest.raises(ConfigError, match=r"bench.url=http://127.0.0.1:1 does not say which models"):
        asyncio.run(meet())


def test_key_is_read_from_the_variable_and_sent(stand_in):
    stand_in.key = "abc"
    with pytest.raises(ConfigError, match="HTTP 401: which key"):
        met(stand_in, options(stand_in))
    met(stand_in, options(stand_in), key=key_from({"NAME": "abc"}, "NAME"))
    with pytest.raises(ConfigError, match=r"bench.api_key_env=OTHER: the environment has no such variable"):
        key_from({"NAME": "abc"}, "OTHER")


# ---------------------------------------------------------------------------------------------------- arithmetic


def outcome(index=0, sent=0.0, chunks=(0.1, 0.2, 0.3), tokens=3, due=None, **fields):
    return Outcome(
        index, sent if due is None else due, sent=sent, chunks=[(moment, None) for moment in chunks],
        first_bare=chunks[0], ended=chunks[-1], output_tokens=tokens, prompt_tokens=5, **fields,
    )  # fmt: skip


def test_latency_is_arithmetic_on_the_moments():
    one = latency_of(outcome(sent=0.05, chunks=(0.1, 0.2, 0.4), tokens=6))
    assert one.ttft == pytest.approx(50) and one.e2e == pytest.approx(350)
    assert one.tpot == pytest.approx(300 / 5) and one.gaps == pytest.approx((100, 200))


def test_answer_of_one_token_has_no_tpot():
    assert latency_of(outcome(chunks=(0.1,), tokens=1)).tpot is None


def test_answer_without_text_counts_from_its_first_chunk():
    bare = Outcome(0, 0.0, sent=0.0, first_bare=0.2, ended=0.5, output_tokens=2)
    assert latency_of(bare).ttft == pytest.approx(200) and latency_of(bare).e2e == pytest.approx(500)
    assert latency_of(bare).tpot == pytest.approx(300)


def test_answer_of_which_one_moment_was_seen_has_no_tpot_and_misses_a_limit_of_it():
    one = latency_of(Outcome(0, 0.0, sent=0.0, first_bare=0.5, ended=0.5, output_tokens=4))
    assert one.tpot is None and not one.meets({"tpot_ms": 1000}) and one.meets({"e2e_ms": 1000})


@pytest.mark.parametrize(
    ("slo", "good"),
    [({"ttft_ms": 150}, 2), ({"ttft_ms": 50}, 0), ({"tpot_ms": 150}, 2), ({"tpot_ms": 99}, 1),
     ({"ttft_ms": 150, "e2e_ms": 250}, 1), ({"e2e_ms": 1000}, 3)],
)  # fmt: skip
def test_goodput_counts_requests_that_meet_every_limit(slo, good):
    outcomes = [outcome(0), outcome(1, chunks=(0.12,), tokens=1), outcome(2, chunks=(0.2, 0.5, 0.8)), outcome(3)]
    outcomes[3].fail("timeout", "")
    one = figures(Point(start=0.0, end=2.0, outcomes=outcomes, loop_lags=[0.0]), slo)
    assert one.figures["goodput"] == pytest.approx(good / 2.0)


def test_late_generator_is_marked_beyond_its_bound():
    late = Point(start=0.0, end=1.0, outcomes=[outcome(sent=0.2, due=0.1, chunks=(0.3,))], loop_lags=[0.0])
    assert figures(late, late=99).late == "the generator was late: sent late, p99 100 ms (bench.max_late_ms=99)"
    assert figures(late, late=101).late is None


def test_events_of_both_apis_are_read():
    assert read_event('{"choices": [{"text": "a", "finish_reason": null}]}').text == "a"
    role = read_event('{"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}')
    assert not role.has_choice
    thought = read_event('{"choices": [{"delta": {"reasoning_content": "hm"}, "finish_reason": null}]}')
    assert thought.has_choice and thought.text == "hm"
    end = read_event('{"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": null}')
    assert end.has_choice and end.finish_reason == "stop"
    usage = read_event('{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}')
    assert (usage.has_choice, usage.prompt_tokens, usage.output_tokens) == (False, 3, 4)


@pytest.mark.parametrize("data", ["[]", "{}", "3", "{", '{"object": "x"}'])
def test_what_is_no_event_is_refused(data):
    with pytest.raises(ValueError):
        read_event(data)


def test_gaps_of_a_stream_add_up():
    moments_of = (0.1, 0.15, 0.4, 0.45)
    one = latency_of(outcome(chunks=moments_of, tokens=4))
    assert one.gaps == pytest.approx([1e3 * (b - a) for a, b in pairwise(moments_of)])
