"""`run=serve`: the model over HTTP, until SIGTERM or Ctrl-C. Needs the extra `serve`.

The address is taken before the model is loaded, so that one that cannot be had is refused at once.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from framework.engine.aio import AsyncLLM
from framework.runs.loading import announce
from framework.runs.unread import OF_BENCH, refuse_texts, refuse_unread
from framework.server import tracing
from framework.server.app import make_app
from framework.server.models import model_name
from framework.server.service import Service
from framework.server.serving import address_of, allow_connections, bound_socket, make_server, run_first
from framework.server.tool_calls import parser_for

if TYPE_CHECKING:
    from framework.config import Config
    from framework.runs import RunArgs

NOT_READ = dict.fromkeys(
    ("prompt", "system", "prompts_file", "output", "target"), "requests say what is generated; leave it out"
)
SET_BY_REQUESTS = {"sampler.output_kind": "a request says whether it streams"}
SWITCH_S = 0.0005
"""How long the event loop's thread waits for the engine's to give up the interpreter, and the other way round; 5 ms by
default. On two busy cores a request is read 1.8 ms after it was sent, and not 3.5 (medians of 60)."""


def run(config: Config, args: RunArgs) -> None:
    """Serves until it is told to end. ConfigError for an address that cannot be had."""
    refuse_texts("serve", args, NOT_READ)
    refuse_unread("serve", args, {"bench": OF_BENCH["bench"], **SET_BY_REQUESTS})
    options = args.server
    options.keys()  # what can be refused is refused before anything is loaded
    parser_for(None, "", options.tool_format)
    tracing.check(options)
    allow_connections()
    sys.setswitchinterval(SWITCH_S)
    with bound_socket(options) as sock:
        announce(config)
        with AsyncLLM(config=config) as llm:
            name = model_name(config, options)
            service = Service(llm, config, name, int(time.time()), options, settings=args.settings())
            address = address_of(sock)

            def ready() -> None:
                print(f"serving {name} at {address} (page, /v1, /metrics, /docs)", flush=True)

            run_first()
            make_server(make_app(service), service.load, options, ready).run(sockets=[sock])
    print("the server has ended", file=sys.stderr)
