"""Traces: a span a request with the times of its output, under the caller's own, and only where they were asked for."""

import asyncio
import http.server
import sys
import threading
from contextlib import contextmanager

import httpx
import pytest
import torch
from fastapi import FastAPI
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from framework import AsyncLLM, SamplingParams
from framework.errors import ConfigError
from framework.server import tracing
from framework.server.app import make_app
from framework.server.options import ServerOptions
from framework.server.service import Service
from framework.testing.crafted import save_crafted

VOCAB = 20
GREEDY = SamplingParams(temperature=0, max_tokens=4)
WORDS = ["engine.dtype=float32", "engine.max_model_len=64", "scheduler.max_num_seqs=4", "kv_cache.num_blocks=17"]
TIMEOUT_S = 60  # nothing comes near it: it turns a hang into a failure
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    table = torch.zeros(VOCAB, VOCAB)
    table[torch.arange(VOCAB), (torch.arange(VOCAB) + 1) % VOCAB] = 8.0
    return save_crafted(tmp_path_factory.mktemp("tracing") / "chain", table, eos_token_id=19)


def traced(folder, scenario):
    """(what `scenario(llm)` returns, finished spans in the order of their ends)"""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def main():
        async with AsyncLLM(folder, overrides=WORDS) as llm:
            await llm.observe("tracing", tracing.RequestSpans(provider, "crafted"))
            return await scenario(llm)

    found = asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
    return found, exporter.get_finished_spans()


async def last(llm, prompt, params=GREEDY, request_id="a"):
    return [output async for output in llm.generate(prompt, params, request_id)][-1]


def app_of(llm, names):
    """Two paths that generate, in the layer under test; the ids of its requests go to `names`."""
    app = FastAPI()

    async def generate():
        names.append(f"r{len(names)}")
        return len((await last(llm, [4], request_id=names[-1])).outputs[0].token_ids)

    app.post("/v1/chat/completions")(generate)
    app.post("/v1/completions")(generate)
    app.add_middleware(tracing.TakeContext)
    return app


def seconds(span):
    return (span.end_time - span.start_time) / 1e9


def test_span_of_a_request_and_its_parts_have_the_times_of_the_output(folder):
    output, spans = traced(folder, lambda llm: last(llm, [4, 5]))
    queue, prefill, decode, whole = spans
    assert [span.name for span in spans] == ["queue", "prefill", "decode", "text_completion crafted"]
    times = output.metrics
    close = {"abs": 1e-6}  # float64 holds the nanoseconds since 1970 to a fraction of a microsecond
    assert whole.start_time / 1e9 == pytest.approx(times.arrival_time, **close)
    assert seconds(whole) == pytest.approx(times.e2e, **close)
    assert seconds(queue) == pytest.approx(times.queue_time, **close)
    assert seconds(prefill) == pytest.approx(times.ttft - times.queue_time, **close)
    assert seconds(decode) == pytest.approx(times.e2e - times.ttft, **close)
    assert {span.parent.span_id for span in (queue, prefill, decode)} == {whole.context.span_id}
    assert {span.context.trace_id for span in spans} == {whole.context.trace_id}


def test_attributes_tell_the_request_and_what_came_of_it(folder):
    params = SamplingParams(temperature=0.5, top_p=0.9, top_k=3, max_tokens=2, seed=7, n=2)
    output, spans = traced(folder, lambda llm: last(llm, [4, 5], params))
    assert dict(spans[-1].attributes) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "crafted",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 3,
        "gen_ai.request.max_tokens": 2,
        "gen_ai.request.seed": 7,
        "gen_ai.response.id": "a",
        "gen_ai.response.model": "crafted",
        "gen_ai.response.finish_reasons": tuple(c.finish_reason for c in output.outputs),
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": sum(len(c.token_ids) for c in output.outputs),
    }


def test_request_that_was_aborted_while_it_waited_has_no_parts(folder):
    _, spans = traced(folder, ended_while_waiting)
    assert [span.name for span in spans] == ["text_completion crafted"]
    assert spans[0].attributes["gen_ai.response.finish_reasons"] == ("abort",)


async def ended_while_waiting(llm):
    def added_and_aborted(engine):
        engine.add_request("a", [4], GREEDY)
        engine.abort("a")

    await llm.ask(added_and_aborted)


def test_request_that_ends_with_an_error_has_a_span_that_says_why(folder):
    params = GREEDY.replace(allowed_token_ids=[6], bad_words_token_ids=[[6, 6]])  # nothing is left after the first 6
    output, spans = traced(folder, lambda llm: last(llm, [5], params))
    assert (spans[-1].status.status_code, spans[-1].status.description) == (StatusCode.ERROR, output.error)


def test_traceparent_of_an_http_request_is_the_parent_of_its_spans(folder):
    names = []

    async def scenario(llm):
        transport = httpx.ASGITransport(app_of(llm, names))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            parent = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
            both = [
                client.post("/v1/chat/completions", headers=parent),
                client.post("/v1/completions"),
            ]
            return [answer.json() for answer in await asyncio.gather(*both)]

    answers, spans = traced(folder, scenario)
    assert answers == [4, 4]
    chat, completion = (
        next(s for s in spans if s.name == f"{operation} crafted") for operation in ("chat", "text_completion")
    )
    assert f"{chat.context.trace_id:032x}" == TRACE_ID
    assert f"{chat.parent.span_id:016x}" == SPAN_ID
    assert completion.parent is None
    assert {chat.attributes["gen_ai.response.id"], completion.attributes["gen_ai.response.id"]} == set(names)


def test_caller_that_is_not_sampled_is_not_traced(folder):
    async def scenario(llm):
        transport = httpx.ASGITransport(app_of(llm, []))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await client.post("/v1/completions", headers={"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-00"})

    assert traced(folder, scenario)[1] == ()


@contextmanager
def collector():
    """(address, [(path, body)] of what came there)"""
    taken = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            taken.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", taken
        finally:
            server.shutdown()
            thread.join()


def spans_in(taken):
    resources = [r for _, body in taken for r in ExportTraceServiceRequest.FromString(body).resource_spans]
    return [span for resource in resources for scope in resource.scope_spans for span in scope.spans]


def test_spans_arrive_at_the_collector_that_the_key_names(folder):
    async def main(options):
        async with AsyncLLM(folder, overrides=WORDS) as llm:
            await tracing.start(Service(llm, None, "crafted", 0, options))
            await last(llm, [4])

    with collector() as (address, taken):
        asyncio.run(asyncio.wait_for(main(ServerOptions(otlp_endpoint=address)), TIMEOUT_S))
    [(path, body)] = taken
    assert path == "/v1/traces"
    assert {span.name for span in spans_in(taken)} == {"queue", "prefill", "decode", "text_completion crafted"}
    [resource] = ExportTraceServiceRequest.FromString(body).resource_spans
    named = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    assert named["service.name"] == "framework"


@pytest.mark.parametrize("stream", [False, True])
def test_server_gives_spans_the_parent_that_its_client_names(folder, stream):
    async def main(options):
        async with AsyncLLM(folder, overrides=WORDS) as llm:
            app = make_app(Service(llm, llm._engine.config, "crafted", 0, options))
            transport = httpx.ASGITransport(app)
            async with (
                app.router.lifespan_context(app),
                httpx.AsyncClient(transport=transport, base_url="http://test") as client,
            ):
                body = {"model": "crafted", "prompt": [[4], [5]], "max_tokens": 2, "stream": stream}
                parent = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
                answer = await client.post("/v1/completions", json=body, headers=parent)
                assert answer.status_code == 200, answer.text

    with collector() as (address, taken):
        asyncio.run(asyncio.wait_for(main(ServerOptions(otlp_endpoint=address)), TIMEOUT_S))
    whole = [span for span in spans_in(taken) if span.name == "text_completion crafted"]
    assert [(span.trace_id.hex(), span.parent_span_id.hex()) for span in whole] == [(TRACE_ID, SPAN_ID)] * 2


def test_endpoint_keeps_a_path_of_its_own():
    assert tracing.traces_url("http://collector:4318/") == "http://collector:4318/v1/traces"
    assert tracing.traces_url("https://collector/otlp/v1/traces") == "https://collector/otlp/v1/traces"


def test_endpoint_that_is_no_address_is_refused():
    with pytest.raises(ConfigError, match=r"server\.otlp_endpoint=localhost is no address\. Use one like http://"):
        tracing.routes(Service(None, None, "crafted", 0, ServerOptions(otlp_endpoint="localhost")))


def test_endpoint_without_opentelemetry_is_refused_and_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    options = ServerOptions(otlp_endpoint="http://localhost:4318")
    with pytest.raises(ConfigError, match=r"server\.otlp_endpoint needs .*pip install 'framework\[otel\]'"):
        tracing.routes(Service(None, None, "crafted", 0, options))


def test_nobody_is_traced_without_an_endpoint():
    class Silent:
        async def observe(self, label, observer):
            raise AssertionError(f"{label} hears the engine")

    asyncio.run(tracing.start(Service(Silent(), None, "crafted", 0)))


def test_names_of_the_environment_stand_over_ours(monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    provider = tracing.provider_for("http://127.0.0.1:9")
    assert provider.resource.attributes["service.name"] == "mine"
    provider.shutdown()
