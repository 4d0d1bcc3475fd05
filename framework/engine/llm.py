"""The offline API: a list of prompts in, a list of outputs out. Everything it does goes through `llm.engine`."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, overload

from framework.config import Config
from framework.engine.admission import chat_prompt
from framework.engine.arguments import (
    check_use_tqdm,
    check_words,
    conversation_list,
    model_path_word,
    params_list,
    prompt_list,
    resolve_config,
    streaming_params,
    template_options,
)
from framework.engine.build import build_chosen, build_engine
from framework.engine.choice import choose
from framework.engine.collector import resting_collector
from framework.engine.home import HomeProcess
from framework.engine.interrupt import between_steps
from framework.engine.progress import Progress
from framework.engine.stream import OutputStream
from framework.errors import NotBuiltError, RequestError
from framework.request import OutputKind, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from types import TracebackType

    from framework.engine.engine import Engine


_Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """An engine with its model, for offline generation. Usable as a context manager.

    model      hub id, folder, GGUF file or `package:NAME`; None = the configuration's default model
    overrides  words of the command line, with or without `+`: ["backend=cpu", "sampler=gumbel"]
    config     a `framework.config.Config` written by hand, instead of overrides
    Raises ConfigError, PluginError, CheckpointError or NotBuiltError.
    It serves the process that made it: in a fork of that one its methods raise RuntimeError, and `close` does nothing.
    """

    engine: Engine

    def __init__(
        self, model: str | None = None, *, overrides: Sequence[str] = (), config: Config | None = None
    ) -> None:
        words = check_words(overrides)
        built = resolve_config(model, words, config)
        self._home = HomeProcess("LLM")
        self._path = model
        self._words = None if config is not None else words
        self._ids = count()
        self._lock = threading.RLock()
        self._busy = False
        self._abandoned = deque[str]()
        self.engine = build_engine(built)

    @overload
    def generate(
        self,
        prompts: Any,
        sampling_params: _Params = None,
        use_tqdm: bool | None = None,
        *,
        stream: Literal[False] = ...,
    ) -> list[RequestOutput]: ...
    @overload
    def generate(
        self, prompts: Any, sampling_params: _Params = None, use_tqdm: bool | None = None, *, stream: Literal[True]
    ) -> OutputStream: ...
    def generate(
        self, prompts: Any, sampling_params: _Params = None, use_tqdm: bool | None = None, *, stream: bool = False
    ) -> list[RequestOutput] | OutputStream:
        """Outputs in the order of the prompts.

        prompts          one prompt or a list: str, list of ids, or a dict with `prompt` or `prompt_token_ids`;
                         a list of ints is one prompt, and so is an array or tensor of them with one dimension
        sampling_params  one for all, or one for each; None = the configured defaults
        use_tqdm         None shows a progress bar when stderr is a terminal
        stream           iterates over outputs as they are made instead: of the kind that the parameters name, else
                         cumulative. Their request_ids rise in the order of the prompts
        All prompts are checked before any runs, and before a stream is returned: an error names the index.
        """
        items = prompt_list(prompts)
        params = params_list(sampling_params, len(items))
        return self._stream(items, params, use_tqdm) if stream else self._run(items, params, use_tqdm)

    @overload
    def chat(
        self,
        messages: Any,
        sampling_params: _Params = None,
        use_tqdm: bool | None = None,
        *,
        stream: Literal[False] = ...,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]: ...
    @overload
    def chat(
        self,
        messages: Any,
        sampling_params: _Params = None,
        use_tqdm: bool | None = None,
        *,
        stream: Literal[True],
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> OutputStream: ...
    def chat(
        self,
        messages: Any,
        sampling_params: _Params = None,
        use_tqdm: bool | None = None,
        *,
        stream: bool = False,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput] | OutputStream:
        """Like `generate`, of one conversation (a list of messages with `role` and `content`) or a list of them.

        chat_template_kwargs  whatever else the template reads, such as {"enable_thinking": False}
        """
        tokenizer, chats = self.engine.tokenizer, conversation_list(messages)
        params = params_list(sampling_params, len(chats))
        options = {**template_options(chat_template_kwargs), "add_generation_prompt": add_generation_prompt}
        prompts = []
        for index, chat in enumerate(chats):
            try:
                prompts.append(chat_prompt(tokenizer, chat, **options))
            except (RequestError, NotBuiltError, TypeError) as e:
                raise type(e)(f"conversation {index}: {e}") from None
        return self._stream(prompts, params, use_tqdm) if stream else self._run(prompts, params, use_tqdm)

    def _run(
        self, prompts: Sequence[Any], params: Sequence[SamplingParams | None], use_tqdm: bool | None
    ) -> list[RequestOutput]:
        check_use_tqdm(use_tqdm)
        with self._turn():
            ids = [self._new_id() for _ in prompts]
            self.engine.add_requests(ids, prompts, [self._whole(p) for p in params])
            try:
                return self._finish(ids, sys.stderr.isatty() if use_tqdm is None else use_tqdm)
            except BaseException:
                for request_id in ids:
                    self.engine.abort(request_id)
                raise

    def _stream(
        self, prompts: Sequence[Any], params: Sequence[SamplingParams | None], use_tqdm: bool | None
    ) -> OutputStream:
        check_use_tqdm(use_tqdm)
        if use_tqdm:
            raise ValueError("use_tqdm=True shows how a whole call gets on; leave it out with stream=True")
        with self._turn():
            ids = [self._new_id() for _ in prompts]
            defaults = self.engine.admission.defaults
            self.engine.add_requests(ids, prompts, [streaming_params(p, defaults) for p in params])
        return OutputStream(self, ids)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One caller of the engine at a time: calls from several threads take turns."""
        self._home.refuse_elsewhere()
        with self._lock:
            before, self._busy = self._busy, True
            try:
                self._abort_abandoned()
                yield
            finally:
                self._busy = before

    def _abandon(self, request_ids: Iterable[str]) -> None:
        """Aborts requests that nobody waits for any more; now, or with the next turn where one is being taken.

        Streams call it at the end of their lives, which may come at any place of any thread: it never waits.
        """
        if not self._home.is_here:
            return
        self._abandoned.extend(request_ids)
        if self._abandoned and self._lock.acquire(blocking=False):
            try:
                if not self._busy:
                    self._abort_abandoned()
            finally:
                self._lock.release()

    def _abort_abandoned(self) -> None:
        while self._abandoned:
            request_id = self._abandoned.popleft()
            if "engine" in self.__dict__:
                self.engine.abort(request_id)

    def _whole(self, params: SamplingParams | None) -> SamplingParams | None:
        """Parameters that give one output, at the end: `output_kind`, configured or passed, is about single steps."""
        if params is None:
            params = self.engine.admission.defaults
        if not isinstance(params, SamplingParams) or params.output_kind is OutputKind.FINAL:
            return params
        whole = params.replace(output_kind=OutputKind.FINAL)
        return whole

    def _new_id(self) -> str:
        return next(i for i in map(str, self._ids) if not self.engine.is_running(i))

    def _finish(self, ids: Sequence[str], show: bool) -> list[RequestOutput]:
        """Steps until all of them are done; outputs of requests that came through `llm.engine` go back to it."""
        own, done, others = set(ids), dict[str, RequestOutput](), list[RequestOutput]()
        try:
            with resting_collector(), between_steps() as interrupted, Progress(len(ids), self.engine, show) as progress:
                while len(done) < len(ids):
                    interrupted()
                    outputs = self.engine.step()
                    others += [o for o in outputs if o.request_id not in own]
                    finished = {o.request_id: o for o in outputs if o.finished and o.request_id in own}
                    done.update(finished)
                    progress.update(len(finished))
                    if len(done) < len(ids) and not self.engine.has_unfinished_requests():
                        raise RuntimeError(f"{len(ids) - len(done)} requests of this call were aborted from elsewhere")
        finally:
            self.engine.put_back(others)
        return [done[i] for i in ids]

    def expert_counts(self) -> dict[str, list[int]]:
        """{block of a mixture of experts: tokens that each expert was given}, by the experts' place in the checkpoint.

        Counted since the engine was built or reconfigured, padding left out. A block behind the last attention sees
        only tokens whose logits are read. {} for a model without experts.
        """
        with self._turn():
            return self.engine.expert_counts()

    def reconfigure(self, overrides: Sequence[str] = (), *, config: Config | None = None) -> None:
        """Makes the engine another one; the weights stay while the keys that they depend on are unchanged.

        overrides  words that come behind those of before; of an LLM that was made from a config only config is possible
        config     takes the place of everything before
        What cannot be is refused before anything is given up, with the errors of the constructor. Should the new engine
        fail to be built after all, the old one is built again. RuntimeError while requests run.
        """
        with self._turn():
            if self.engine.has_unfinished_requests():
                raise RuntimeError("reconfigure: requests are running; wait for them, or abort them first")
            words = check_words(overrides)
            if config is None and self._words is None:
                raise ValueError("this LLM was made from a config, and words have nothing to stand on; pass config=")
            path = None if model_path_word(words) is not None or config is not None else self._path
            words = [*(self._words or ()), *words] if config is None else words
            built = resolve_config(path, words, config)
            if built != self.engine.config:
                self._rebuild(built)
            self._path, self._words = path, None if config is not None else words

    def _rebuild(self, config: Config) -> None:
        before, plugins, loaded = self.engine.config, self.engine.plugins, self.engine.loaded
        kept = loaded if loaded.serves(config) else None
        del loaded  # weights that do not stay go before the others come
        choice = choose(config, plugins, kept)
        self.close()
        try:
            self.engine = build_chosen(choice, plugins, kept)
        except BaseException:
            self.engine = build_engine(before, plugins, kept)
            raise

    def close(self) -> None:
        """Aborts what runs and frees the model. The object cannot be used afterwards."""
        engine = self.__dict__.pop("engine", None)
        if engine is not None and self._home.is_here:
            engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name == "engine":
            raise RuntimeError("this LLM is closed; make another one")
        raise AttributeError(f"'LLM' object has no attribute {name!r}")
