"""A span for each request of an engine, with its wait, its prompt and its decodes as children: OpenTelemetry, OTLP.

Spans are made when a request has ended, from the times that its output tells; the engine's thread only hands it over.
The parent comes from the `traceparent` of the HTTP request, or from a span of whoever calls the engine in this process.
Needs the extra `otel`. Attributes: OpenTelemetry's semantic conventions for generative AI.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from framework import __version__
from framework.discovery import OURS
from framework.errors import ConfigError
from framework.worker.task_thread import TaskThread

if TYPE_CHECKING:
    from fastapi import APIRouter
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

    from framework.request import Request, RequestMetrics, RequestOutput, SamplingParams
    from framework.server.metrics_http import App, Receive, Scope, Send
    from framework.server.options import ServerOptions
    from framework.server.service import Service

TRACES_PATH = "/v1/traces"
EXPORT_TIMEOUT_S = 5
"""How long a collector that cannot be reached is tried, which the end of a server waits for."""
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/responses": "chat"}
_path: ContextVar[str] = ContextVar("_path", default="")


async def start(service: Service) -> None:
    """Lets traces hear the engine when `server.otlp_endpoint` says where they go."""
    endpoint = service.options.otlp_endpoint
    if endpoint is not None:
        await service.llm.observe("tracing", RequestSpans(provider_for(endpoint), service.model_name))


def routes(service: Service) -> APIRouter:
    """None: traces are sent, and not asked for. ConfigError when they cannot be."""
    from fastapi import APIRouter

    check(service.options)
    return APIRouter()


def check(options: ServerOptions) -> None:
    """ConfigError where `server.otlp_endpoint` is no address, or OpenTelemetry is not installed."""
    if options.otlp_endpoint is not None:
        traces_url(options.otlp_endpoint)
        require()


def require() -> None:
    """ConfigError without OpenTelemetry."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"server.otlp_endpoint needs OpenTelemetry ({error}). Install it with: pip install '{OURS}[otel]', or "
            "leave the key out"
        ) from None


def traces_url(endpoint: str) -> str:
    """The address that traces are sent to: an endpoint without a path gets OTLP's own. ConfigError for no address."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"server.otlp_endpoint={endpoint} is no address. Use one like http://localhost:4318")
    return endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}{TRACES_PATH}"


def provider_for(endpoint: str) -> TracerProvider:
    """Sends spans to a collector, from a thread of its own; one that cannot be reached is named in the log.

    OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES stand over the names that are given here.
    """
    require()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = Resource.create({"service.name": OURS, "service.version": __version__})
    provider = TracerProvider(resource=named.merge(OTELResourceDetector().detect()))
    exporter = OTLPSpanExporter(endpoint=traces_url(endpoint), timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class _Asked(NamedTuple):
    """Where a request came from. context: with the span around it, if any; path: of the HTTP request, or empty."""

    context: Context
    path: str


class RequestSpans:
    """Observer of one engine; ends the provider with it."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        self._provider, self._model = provider, model
        self._tracer = provider.get_tracer(OURS, __version__)
        self._asked: dict[str, _Asked] = {}
        self._thread = TaskThread("framework-traces")

    def on_request_added(self, request: Request) -> None:
        from opentelemetry.context import get_current

        self._asked[request.request_id] = _Asked(get_current(), _path.get())

    def on_request_finished(self, request: Request, output: RequestOutput) -> None:
        asked = self._asked.pop(request.request_id, None)
        if asked is not None:  # else it was there before traces were
            self._thread.submit(self._write, request.params, output, asked)

    def close(self) -> None:
        """Waits until the spans so far are sent, or cannot be."""
        self._thread.stop()
        self._provider.shutdown()

    def _write(self, params: SamplingParams, output: RequestOutput, asked: _Asked) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        operation = _OPERATIONS.get(asked.path, "text_completion")
        attributes = {
            "gen_ai.operation.name": operation,
            **_of_request(self._model, params),
            **_of_output(self._model, output),
        }
        moments = _moments(output.metrics)
        span = self._tracer.start_span(
            f"{operation} {self._model}", asked.context, SpanKind.SERVER, attributes, start_time=moments[0][1]
        )
        if output.error is not None:
            span.set_attribute("error.type", "error")
            span.set_status(Status(StatusCode.ERROR, output.error))
        inside = set_span_in_context(span, asked.context)
        for name, begin, end in moments[1:]:
            self._tracer.start_span(name, inside, start_time=begin).end(end)
        span.end(moments[0][2])


def _moments(m: RequestMetrics) -> list[tuple[str, int, int]]:
    """[(name, begin, end)] of the request, and of those of its parts that it came to; nanoseconds since 1970."""
    durations = [("request", 0.0, m.e2e), ("queue", 0.0, m.queue_time), ("prefill", m.queue_time, m.ttft)]
    durations.append(("decode", m.ttft, m.e2e))
    return [
        (name, int(1e9 * (m.arrival_time + begin)), int(1e9 * (m.arrival_time + end)))
        for name, begin, end in durations
        if begin is not None and end is not None
    ]


def _of_request(model: str, params: SamplingParams) -> dict[str, Any]:
    found = {
        "gen_ai.request.model": model,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.stop_sequences": tuple(params.stop) if params.stop else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _of_output(model: str, output: RequestOutput) -> dict[str, Any]:
    completions = output.outputs
    return {
        "gen_ai.response.id": output.request_id,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": tuple(str(completion.finish_reason) for completion in completions),
        "gen_ai.usage.input_tokens": len(output.prompt_token_ids),
        "gen_ai.usage.cache_read.input_tokens": output.num_cached_tokens,
        "gen_ai.usage.output_tokens": sum(len(completion.token_ids) for completion in completions),
    }


class TakeContext:
    """The application `app`, with each request in the context that its `traceparent` tells of. An ASGI layer."""

    def __init__(self, app: App) -> None:
        require()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        from opentelemetry.context import attach, detach
        from opentelemetry.propagate import extract

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        token, path = attach(extract(headers)), _path.set(scope["path"])
        try:
            await self._app(scope, receive, send)
        finally:
            _path.reset(path)
            detach(token)
