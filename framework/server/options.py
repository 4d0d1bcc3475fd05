"""Keys `server.*`: where the server listens, what it takes, and how long it waits. Pure data; `run=serve` reads it.

Nothing here is part of an engine: two servers with different limits give the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from framework.config import check_count
from framework.errors import ConfigError, as_typed
from framework.server.metrics_slo import Objectives


@dataclass(frozen=True)
class ServerOptions:
    """How the server is reached and how much it lets in.

    host, port       address it listens at; port 0 takes a free one, which is printed
    model_name       what clients call the model; None: from model.path
    api_keys         of which a request must bring one; empty: none is asked for
    api_keys_file    file with one more key a line; lines that begin with # say nothing
    cors_origins     origins whose pages may call the server from a browser
    max_body_bytes   of a request
    max_n            completions that one request may ask for: its n times its prompts
    max_logprobs     tokens beside each token whose logprobs a request may ask for
    max_waiting      completions that may wait behind the scheduler.max_num_seqs that run; beyond them 429 is answered
    tool_format      how the model writes calls of tools; None: from its chat template
    request_timeout  seconds that a request may take, its sending included; None: any time
    drain_timeout    seconds that running requests have after SIGTERM
    slo              times that a request should keep, for the metrics alone
    otlp_endpoint    where traces go, the address of an OpenTelemetry collector (OTLP over HTTP); None: nowhere
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str | None = None
    api_keys: list[str] = field(default_factory=list)
    api_keys_file: str | None = None
    cors_origins: list[str] = field(default_factory=list)
    max_body_bytes: int = 16 * 2**20
    max_n: int = 128
    max_logprobs: int = 128
    max_waiting: int = 1024
    tool_format: str | None = None
    request_timeout: float | None = None
    drain_timeout: float = 30.0
    slo: Objectives = field(default_factory=Objectives)
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("port", 0), ("max_body_bytes", 1), ("max_n", 1), ("max_logprobs", 0), ("max_waiting", 0)):
            check_count(f"server.{name}", getattr(self, name), least)
        if self.port > 65535:
            raise ConfigError(f"server.port={as_typed(self.port)} is too large. Use 65535 or less, or 0 for a free one")
        if not self.host:
            raise ConfigError("server.host= is empty. Use 127.0.0.1, or 0.0.0.0 to be reached from elsewhere")
        if self.request_timeout is not None and not self.request_timeout > 0:
            raise ConfigError(f"server.request_timeout={self.request_timeout} must be above 0, seconds, or null")
        if not 0 <= self.drain_timeout < float("inf"):
            raise ConfigError(f"server.drain_timeout={self.drain_timeout} must be finite and at least 0, seconds")
        if not all(key and key.isascii() and key.isprintable() and key == key.strip() for key in self.api_keys):
            raise ConfigError("server.api_keys holds an empty key, or one that a header cannot carry. Use plain ASCII")

    def keys(self) -> Sequence[str]:
        """All keys, those of the file as well. ConfigError for a file that cannot be read or has none."""
        if self.api_keys_file is None:
            return self.api_keys
        try:
            lines = Path(self.api_keys_file).read_text(encoding="ascii").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not plain ASCII"
            raise ConfigError(f"server.api_keys_file={self.api_keys_file}: cannot be read ({reason})") from None
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise ConfigError(f"server.api_keys_file={self.api_keys_file} holds no key. Write one a line")
        return [*self.api_keys, *found]
