"""Grammar `llguidance`: masks by guidance-ai/llguidance, over the token bytes that the engine gives.

The library wants an id that ends a text; it gets one behind the vocabulary, so that no id of the model is taken for it:
the engine decides itself which ids end a request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from framework.interfaces import CompiledGrammar, GrammarContext, GrammarSpec
from framework_grammars.rollback import CountedMatcher
from framework_grammars.schema_words import schemas

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from framework_grammars.options import LLGuidanceOptions

_LOWER = ("minimum", "exclusiveMinimum")


class LLGuidance:
    """`framework.interfaces.Grammar`."""

    def __init__(self, options: LLGuidanceOptions, ctx: GrammarContext) -> None:
        import llguidance

        self._llguidance, self._options, self._ctx = llguidance, options, ctx
        vocabulary: Any = _Vocabulary(ctx)
        self._tokenizer = llguidance.LLTokenizer(vocabulary, n_vocab=ctx.vocab_size + 1)

    def check(self, spec: GrammarSpec) -> None:
        message = self._llguidance.LLMatcher.validate_grammar(self._source(spec), self._tokenizer)
        if message and not message.startswith("WARNING"):
            raise ValueError(message)

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        first = self._llguidance.LLMatcher(self._tokenizer, self._source(spec), log_level=0)
        if first.is_error():
            raise ValueError(_reason(first))
        return _Compiled(first, self._ctx)

    def _source(self, spec: GrammarSpec) -> str:
        """The constraint in the library's own language. ValueError for what cannot be said in it."""
        library, text = self._llguidance, spec.text
        options = {"whitespace_flexible": self._options.any_whitespace}
        if spec.kind in ("json", "json_object"):
            schema = _schema(text) if text else '{"type": "object"}'
            return str(library.LLMatcher.grammar_from_json_schema(schema, overrides=options))
        if spec.kind == "structural_tag":
            return self._tags(json.loads(text))
        return str(library.grammar_from(spec.kind, text))

    def _tags(self, tag: Any) -> str:
        """Free text in which tags begin with their triggers and hold JSON: the one form that the library knows."""
        form = tag.get("format") if isinstance(tag, dict) else None
        known = {"type", "triggers", "tags"}
        if not isinstance(form, dict) or form.get("type") != "triggered_tags" or set(form) - known:
            raise ValueError("of structural tags, llguidance serves the format 'triggered_tags' only, with 'triggers' "
                             "and 'tags'. Use grammar=xgrammar for others")  # fmt: skip
        tags = [self._tag(one, form.get("triggers") or []) for one in form.get("tags") or []]
        if not tags:
            raise ValueError("'tags' is empty. Give at least one")
        return str(self._llguidance.StructTag.to_grammar(tags, assume_special=False))

    def _tag(self, tag: Any, triggers: Sequence[Any]) -> Any:
        content = tag.get("content") if isinstance(tag, dict) else None
        if not isinstance(content, dict) or content.get("type") != "json_schema":
            raise ValueError("a tag's content must be of type 'json_schema' in llguidance. Use grammar=xgrammar")
        begin, end = tag.get("begin"), tag.get("end")
        if not isinstance(begin, str) or not isinstance(end, str):
            raise ValueError(f"a tag needs 'begin' and 'end', two texts, got {begin!r} and {end!r}")
        fitting = [t for t in triggers if isinstance(t, str) and t and begin.startswith(t)]
        if not fitting:
            raise ValueError(f"no trigger begins the tag {begin!r}. Triggers: {list(triggers)}")
        schema: Any = json.loads(_schema(json.dumps(content.get("json_schema", {}))))
        return self._llguidance.StructTag(trigger=fitting[0], begin=begin, grammar=schema, end=end)


class _Vocabulary:
    """What the library reads of a tokenizer. Special tokens bear their names, for grammars that ask for them."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, ctx: GrammarContext) -> None:
        self.eos_token_id = ctx.vocab_size
        self.tokens = [*(ctx.special_tokens.get(i, "").encode() or text for i, text in enumerate(ctx.tokens)), b""]
        self.special_token_ids = [*ctx.special_tokens, self.eos_token_id]
        self._encode = ctx.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


class _Compiled:
    def __init__(self, first: Any, ctx: GrammarContext) -> None:
        self._first, self._ctx = first, ctx

    def matcher(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._first.deep_copy(), self._ctx.vocab_size, self._ctx.max_rollback)


class LLGuidanceMatcher(CountedMatcher):
    """`framework.interfaces.GrammarMatcher`."""

    def __init__(self, matcher: Any, vocab_size: int, max_rollback: int) -> None:
        super().__init__(matcher, max_rollback)
        self._bits = np.zeros(-(-(vocab_size + 1) // 32), np.int32)  # with a place for the library's own end
        self._end = divmod(vocab_size, 32)

    def fill(self, row: NDArray[np.int32]) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():
            raise RuntimeError(_reason(self._matcher))
        word, bit = self._end
        self._bits[word] &= ~np.int32(np.uint32(1 << bit).view(np.int32))
        row[:] = self._bits[: len(row)]

    def accept(self, token_ids: Sequence[int]) -> bool:
        taken = self._matcher.try_consume_tokens(list(token_ids))
        if self._matcher.is_error():
            raise RuntimeError(_reason(self._matcher))
        if taken < len(token_ids):
            self._matcher.rollback(taken)
            return False
        self._num_taken += taken
        return True

    def is_accepting(self) -> bool:
        return bool(self._matcher.is_accepting())

    def is_terminated(self) -> bool:
        if not self.is_accepting() or self._matcher.is_stopped():
            return self.is_accepting()
        return not self._num_taken and self._is_empty()  # the library finds out with the first token

    def _is_empty(self) -> bool:
        """Whether the one text is the empty one."""
        self.fill(row := np.empty_like(self._bits))
        return not row.any()


def _schema(text: str) -> str:
    """The schema as the library reads it. ValueError for bounds that it does not keep to."""
    schema = json.loads(text)
    for path, node in schemas(schema):
        for word in ("exclusiveMinimum", "exclusiveMaximum"):
            if _is_let_through(node, word):
                raise ValueError(
                    f"at {path}: {word}={node[word]} itself is let through by llguidance, since the other bound is "
                    "less than 1 away. Use grammar=xgrammar, or bounds that belong to the range"
                )
    return "{}" if schema is True else text


def _is_let_through(node: Mapping[str, Any], word: str) -> bool:
    """Whether the range is shorter than 1 and begins, on the side of 0, behind a whole number that is none of it."""
    sign, others = (1, ("maximum", "exclusiveMaximum")) if word == "exclusiveMinimum" else (-1, _LOWER)
    numbers = [node[w] for w in (word, *others) if isinstance(node.get(w), int | float)]
    if node.get("type") == "integer" or word not in node or len(numbers) < 2:
        return False
    bound, other = sign * numbers[0], min(sign * n for n in numbers[1:])
    return bound >= 0 and bound == int(bound) and bound < other < bound + 1


def _reason(matcher: Any) -> str:
    """What went wrong, without the state of the library behind it."""
    return str(matcher.get_error()).partition("\n<state>")[0]
