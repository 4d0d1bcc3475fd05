"""`/metrics`: the numbers are those of the requests that ran, whatever became of them, and Prometheus can read them."""

import asyncio
import threading
from collections import defaultdict
from contextlib import asynccontextmanager

import httpx
import pytest
import torch
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from framework import AsyncLLM, SamplingParams, __version__
from framework.server import metrics
from framework.server.app import make_app
from framework.server.metrics_http import CountRequests, HttpCounts
from framework.server.metrics_slo import Objectives
from framework.server.options import ServerOptions
from framework.server.service import Service
from framework.testing.crafted import save_crafted

VOCAB = 20
GREEDY = SamplingParams(temperature=0, max_tokens=4)
WORDS = ["engine.dtype=float32", "engine.max_model_len=64", "scheduler.max_num_seqs=4", "kv_cache.num_blocks=17"]
TIMEOUT_S = 60  # nothing comes near it: it turns a hang into a failure
F = "framework:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    table = torch.zeros(VOCAB, VOCAB)
    table[torch.arange(VOCAB), (torch.arange(VOCAB) + 1) % VOCAB] = 8.0
    return save_crafted(tmp_path_factory.mktemp("metrics") / "chain", table, eos_token_id=19)


def serve(folder, scenario, *words, slo=None):
    """What `scenario(service, client)` returns, of a new engine with `/metrics`."""

    async def main():
        async with AsyncLLM(folder, overrides=[*WORDS, *words]) as llm:
            service = Service(llm, llm._engine.config, "crafted", 0, ServerOptions(slo=slo or Objectives()))
            async with client_of(service) as client:
                return await scenario(service, client)

    return asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))


@asynccontextmanager
async def client_of(service):
    app = FastAPI()
    app.include_router(metrics.routes(service))
    app.add_middleware(CountRequests, counts=service.metrics.http)
    await metrics.start(service)

    @app.get("/items/{name}")
    async def item(name: str):
        return name

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def scrape(client, accept=None):
    """{name: {labels as a sorted tuple: value}}"""
    answer = await client.get("/metrics", headers={} if accept is None else {"accept": accept})
    assert answer.status_code == 200, answer.text
    found = defaultdict(dict)
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found[sample.name][tuple(sorted(sample.labels.items()))] = sample.value
    return found


def value(found, name, **labels):
    return found[F + name][tuple(sorted(labels.items()))]


async def last(service, prompt, params=GREEDY, request_id=None):
    return [output async for output in service.llm.generate(prompt, params, request_id)][-1]


async def everyone(service, *asked):
    return await asyncio.gather(*(last(service, prompt, params) for prompt, params in asked))


def test_counters_are_those_of_the_requests_that_ran(folder):
    async def scenario(service, client):
        outputs = await everyone(
            service, ([4, 5], GREEDY), ([1] * 7, GREEDY.replace(n=3, temperature=1, seed=1)), ([16], GREEDY)
        )
        return outputs, await scrape(client), await service.llm.stats()

    outputs, found, stats = serve(folder, scenario)
    completions = [completion for output in outputs for completion in output.outputs]
    assert value(found, "prompt_tokens_total") == 2 + 7 + 1
    assert value(found, "generation_tokens_total") == sum(len(c.token_ids) for c in completions)
    assert value(found, "prefill_tokens_total") == stats["prefill_tokens"]
    for reason in ("stop", "length", "abort", "error"):
        ended = sum(c.finish_reason == reason for c in completions)
        assert value(found, "request_success_total", finished_reason=reason) == ended
    assert value(found, "request_success_total", finished_reason="stop") >= 1
    assert value(found, "steps_total") == stats["num_steps"] == value(found, "iteration_tokens_total_count")
    assert value(found, "iteration_tokens_total_sum") == stats["prefill_tokens"] + stats["decode_tokens"] - len(
        completions
    )


def test_histograms_hold_the_times_that_the_outputs_tell(folder):
    async def scenario(service, client):
        outputs = await everyone(service, *[([4, index], GREEDY.replace(n=1 + index)) for index in range(3)])
        return [output.metrics for output in outputs], outputs, await scrape(client)

    times, outputs, found = serve(folder, scenario)
    expected = {
        "time_to_first_token_seconds": [m.ttft for m in times],
        "request_queue_time_seconds": [m.queue_time for m in times],
        "request_prefill_time_seconds": [m.ttft - m.queue_time for m in times],
        "inter_token_latency_seconds": [gap for m in times for gap in m.itl],
        "time_per_output_token_seconds": [m.tpot for m in times],
        "e2e_request_latency_seconds": [m.e2e for m in times],
        "request_decode_time_seconds": [m.e2e - m.ttft for m in times],
        "request_prompt_tokens": [2, 2, 2],
        "request_generation_tokens": [sum(len(c.token_ids) for c in output.outputs) for output in outputs],
    }
    for name, values in expected.items():
        assert value(found, f"{name}_count") == len(values), name
        assert value(found, f"{name}_sum") == pytest.approx(sum(values), rel=1e-12), name
        for ((_, bound),), count in found[f"{F}{name}_bucket"].items():
            assert count == sum(v <= float(bound) for v in values), (name, bound)


def test_times_of_a_running_request_are_counted_once_and_before_its_end(folder):
    async def scenario(service, client):
        stream = service.llm.generate([4], GREEDY.replace(max_tokens=40, ignore_eos=True), "a")
        seen = [await anext(stream) for _ in range(5)]
        during = await scrape(client)
        async for output in stream:
            seen.append(output)
        return during, await scrape(client), seen[-1].metrics

    during, after, times = serve(folder, scenario)
    assert value(during, "time_to_first_token_seconds_count") == 1
    assert value(during, "prompt_tokens_total") == 1
    assert 4 <= value(during, "inter_token_latency_seconds_count") <= 39
    assert value(during, "e2e_request_latency_seconds_count") == 0
    assert value(after, "time_to_first_token_seconds_count") == 1
    assert value(after, "inter_token_latency_seconds_count") == 39
    assert value(after, "inter_token_latency_seconds_sum") == pytest.approx(sum(times.itl), rel=1e-12)


def test_aborted_request_counts_as_aborted_and_not_as_served(folder):
    async def scenario(service, client):
        stream = service.llm.generate([4], GREEDY.replace(max_tokens=50, ignore_eos=True), "a")
        await anext(stream)
        running = await scrape(client)
        await service.llm.abort("a")
        await stream.aclose()
        return running, await scrape(client)

    running, found = serve(folder, scenario, slo=Objectives(ttft_ms=60000))
    assert (value(running, "num_requests_running"), value(running, "num_requests_waiting")) == (1, 0)
    assert value(running, "kv_cache_usage_perc") >= 1 / 16
    assert (value(found, "num_requests_running"), value(found, "kv_cache_usage_perc")) == (0, 0)
    assert value(found, "request_success_total", finished_reason="abort") == 1
    assert value(found, "slo_requests_total", outcome="abort") == 1
    assert value(found, "time_to_first_token_seconds_count") == 1
    assert value(found, "e2e_request_latency_seconds_count") == 0


def test_preempted_requests_have_the_gaps_that_they_waited(folder):
    async def scenario(service, client):
        params = GREEDY.replace(max_tokens=40, ignore_eos=True)
        outputs = await everyone(service, *[([4, index], params) for index in range(3)])
        return [output.metrics for output in outputs], await scrape(client), await service.llm.stats()

    times, found, stats = serve(folder, scenario, "kv_cache.num_blocks=5")
    assert value(found, "num_preemptions_total") == stats["num_preemptions"] > 0
    gaps = [gap for m in times for gap in m.itl]
    assert value(found, "inter_token_latency_seconds_count") == len(gaps) == 3 * 39
    assert value(found, "inter_token_latency_seconds_sum") == pytest.approx(sum(gaps), rel=1e-12)
    assert value(found, "prompt_tokens_total") == 6  # once, however often they were computed


def test_prefix_hits_are_counted_by_the_token(folder):
    async def scenario(service, client):
        prompt = list(range(18)) * 2
        await last(service, prompt)
        again = await last(service, prompt)
        return again.num_cached_tokens, await scrape(client)

    num_cached, found = serve(folder, scenario)
    assert value(found, "prefix_cache_hits_total") == num_cached == 32
    assert value(found, "prefix_cache_queries_total") == 72
    assert (value(found, "prompt_tokens_total"), value(found, "prompt_tokens_cached_total")) == (72, 32)
    assert value(found, "prefill_tokens_total") == 40


def test_request_that_ends_with_an_error_is_counted_as_one(folder):
    async def scenario(service, client):
        # after the first 6 there is nothing left to draw
        params = GREEDY.replace(allowed_token_ids=[6], bad_words_token_ids=[[6, 6]])
        output = await last(service, [5], params)
        return output, await scrape(client)

    output, found = serve(folder, scenario)
    assert output.outputs[0].finish_reason == "error", output
    assert value(found, "request_success_total", finished_reason="error") == 1
    assert value(found, "slo_requests_total", outcome="error") == 1


@pytest.mark.parametrize(("limit_ms", "outcome"), [(60000, "good"), (1e-6, "late")])
def test_goodput_counts_requests_that_keep_every_objective(folder, limit_ms, outcome):
    slo = Objectives(ttft_ms=60000, e2e_ms=limit_ms)

    async def scenario(service, client):
        await everyone(service, ([4], GREEDY), ([5], GREEDY))
        return await scrape(client)

    found = serve(folder, scenario, slo=slo)
    assert value(found, "slo_requests_total", outcome=outcome) == 2
    assert sum(found[f"{F}slo_requests_total"].values()) == 2
    assert value(found, "slo_seconds", objective="e2e") == limit_ms / 1e3
    assert value(found, "slo_seconds", objective="ttft") == 60


def test_host_seconds_by_part_are_those_of_the_engine(folder):
    async def scenario(service, client):
        await last(service, [4])
        return await scrape(client), await service.llm.stats()

    found, stats = serve(folder, scenario)
    parts = {dict(labels)["part"]: seconds for labels, seconds in found[f"{F}step_part_seconds_total"].items()}
    assert parts == stats["step_seconds"]
    assert {"schedule", "prepare", "forward", "update"} <= set(parts)


def test_engine_info_names_model_backend_attention_and_version(folder):
    async def scenario(service, client):
        return await scrape(client)

    ((labels, one),) = serve(folder, scenario)[f"{F}engine_info"].items()
    assert one == 1
    facts = dict(labels)
    assert (facts["model"], facts["architecture"], facts["version"]) == ("crafted", "llama", __version__)
    assert (facts["backend"], facts["attention"], facts["dtype"]) == ("cpu", "cpu", "float32")


def test_http_answers_are_counted_by_route_template(folder):
    async def scenario(service, client):
        for path in ("/items/a", "/items/b", "/nothing/1", "/nothing/2"):
            await client.get(path)
        await client.request("BREW", "/items/a")
        return await scrape(client)

    found = serve(folder, scenario)
    answers = {
        tuple(v for _, v in labels): count for labels, count in found[f"{F}http_requests_total"].items()
    }  # (method, route, status)
    assert answers[("GET", "/items/{name}", "200")] == 2
    assert answers[("GET", "none", "404")] == 2
    assert {key[0] for key in answers} == {"GET", "other"}
    assert value(found, "http_request_duration_seconds_count", method="GET", route="/items/{name}") == 2
    assert value(found, "http_requests_open") == 1  # the scrape itself


def test_names_are_the_same_whatever_format_a_client_asks_for(folder):
    async def scenario(service, client):
        await scrape(client)
        return await scrape(client), await scrape(client, "application/openmetrics-text; version=1.0.0")

    text, openmetrics = serve(folder, scenario)
    assert set(text) == set(openmetrics)


def test_engine_that_does_not_answer_in_time_is_said_so(folder, monkeypatch):
    monkeypatch.setattr(metrics, "ENGINE_TIMEOUT_S", 0.05)

    async def scenario(service, client):
        held = threading.Event()
        step = asyncio.create_task(service.llm.ask(lambda engine: held.wait(TIMEOUT_S)))
        await asyncio.sleep(0)
        answer = await client.get("/metrics")
        held.set()
        await step
        return answer

    answer = serve(folder, scenario)
    assert (answer.status_code, answer.text) == (503, "the engine's step did not end in 0.05 s")


@asynccontextmanager
async def application(service):
    """The whole server of a service, with its layers."""
    app = make_app(service)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client


def test_server_counts_what_its_layers_refuse_as_well(folder):
    async def main():
        async with AsyncLLM(folder, overrides=WORDS) as llm:
            service = Service(llm, llm._engine.config, "crafted", 0, ServerOptions(api_keys=["key"]))
            async with application(service) as client:
                refused = await client.get("/metrics")
                client.headers["authorization"] = "Bearer key"
                body = {"model": "crafted", "prompt": [4, 5], "max_tokens": 3}
                await client.post("/v1/completions", json=body)
                await client.post("/v1/completions", json=body | {"stream": True})
                await client.post("/v1/completions", json=body | {"max_tokens": -1})
                return refused.status_code, await scrape(client)

    refused, found = asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
    assert refused == 401
    answers = {tuple(v for _, v in labels): count for labels, count in found[f"{F}http_requests_total"].items()}
    assert answers == {
        ("GET", "none", "401"): 1,
        ("POST", "/v1/completions", "200"): 2,
        ("POST", "/v1/completions", "400"): 1,
    }
    assert value(found, "generation_tokens_total") == 6


def test_answer_that_failed_is_counted_as_500():
    counts = HttpCounts()

    async def failing(scope, receive, send):
        raise ValueError("no")

    async def main():
        with pytest.raises(ValueError, match="no"):
            await CountRequests(failing, counts)({"type": "http", "method": "GET"}, None, None)

    asyncio.run(main())
    assert counts.read().answers == {("GET", "none", "500"): 1}
    assert counts.read().num_open == 0


def test_client_that_leaves_before_an_answer_has_none():
    counts = HttpCounts()

    async def hanging(scope, receive, send):
        await asyncio.Event().wait()

    async def main():
        request = asyncio.create_task(CountRequests(hanging, counts)({"type": "http", "method": "GET"}, None, None))
        await asyncio.sleep(0)
        assert counts.read().num_open == 1
        request.cancel()
        await asyncio.wait([request])

    asyncio.run(main())
    assert counts.read().answers == {("GET", "none", "none"): 1}
    assert counts.read().num_open == 0
