"""What the answers of completions and chats have in common: their head, their usage, and pieces put together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from framework.request import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from framework.server.generating import Placed
    from framework.server.logprobs import Entry


@dataclass(frozen=True)
class Head:
    """Fields that every object and every event of one answer begins with. created: seconds since 1970."""

    id: str
    kind: str
    created: int
    model: str

    def fields(self) -> dict[str, Any]:
        return {"id": self.id, "object": self.kind, "created": self.created, "model": self.model}


@dataclass
class Usage:
    """Tokens of an answer so far. A prompt counts once, however many completions it has."""

    num_completion: int = 0
    _prompts: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, place: int, output: RequestOutput) -> None:
        """output: a piece, or the whole of a prompt's completions."""
        self._prompts[place] = len(output.prompt_token_ids), output.num_cached_tokens
        self.num_completion += sum(len(one.token_ids) for one in output.outputs)

    def fields(self) -> dict[str, Any]:
        num_prompt = sum(num for num, _ in self._prompts.values())
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self.num_completion,
            "total_tokens": num_prompt + self.num_completion,
            "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in self._prompts.values())},
        }


def usage_of(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """Of finished outputs."""
    usage = Usage()
    for place, output in enumerate(outputs):
        usage.add(place, output)
    return usage.fields()


@dataclass(slots=True)
class Piece:
    """What is new of one completion. index: among all choices of the answer."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[Entry] | None
    finish_reason: str | None
    stop_reason: int | str | None
    output: RequestOutput

    def take(self, one: CompletionOutput, output: RequestOutput) -> None:
        """Adds what came after it."""
        self.text += one.text
        self.token_ids = [*self.token_ids, *one.token_ids]
        if one.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *one.logprobs]
        self.finish_reason, self.stop_reason, self.output = one.finish_reason, one.stop_reason, output


class Pieces:
    """Pieces of a stream, one a completion with news. n: completions a prompt."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._ended: set[int] = set()
        self.usage = Usage()

    def of(self, placed: Sequence[Placed]) -> Iterator[Piece]:
        """Completions that have ended are told of once: later outputs hold them with nothing new."""
        found: dict[int, Piece] = {}
        for place, output in placed:
            self.usage.add(place, output)
            for one in output.outputs:
                index = place * self._n + one.index
                if index in found:
                    found[index].take(one, output)
                elif index not in self._ended and (one.token_ids or one.finish_reason is not None or one.text):
                    logprobs = one.logprobs
                    found[index] = Piece(
                        index, one.text, one.token_ids, logprobs, one.finish_reason, one.stop_reason, output
                    )
        self._ended.update(index for index, piece in found.items() if piece.finish_reason is not None)
        return iter(found.values())
