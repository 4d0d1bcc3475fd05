"""One request's grammar, from the wait for its compilation to its last token: masks out, tokens in.

Which ids end a request is decided here and not by grammars: they may be drawn where the text is whole, and nowhere
else. The scheduler asks; it runs such a request one step at a time. What a grammar raises ends its request alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

import numpy as np

from framework.structured.vocabulary import bits_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from framework.interfaces import CompiledGrammar, GrammarMatcher
    from framework.structured.vocabulary import Vocabulary

_EVERYTHING = np.int32(-1)


class Constraint:
    """The grammar of one request.

    label       the grammar and the field, as messages call them
    endings     ids that end the request: eos, unless it ignores that, and its stop ids
    min_tokens  of the request. A text that is whole, and that nothing can follow, ends it earlier
    think_end   the id behind which the grammar holds; None: it holds from the first token on
    error       what ended it, None while all is well
    """

    def __init__(
        self,
        compiled: Future[CompiledGrammar],
        vocabulary: Vocabulary,
        label: str,
        endings: frozenset[int],
        min_tokens: int,
        think_end: int | None,
    ) -> None:
        self.error: str | None = None
        self._compiled, self._vocabulary, self._label = compiled, vocabulary, label
        self._endings, self._min_tokens, self._think_end = endings, min_tokens, think_end
        self._is_thinking = think_end is not None
        self._end_bits = bits_of(endings, len(vocabulary.tokens))
        self._others = vocabulary.existing & ~self._end_bits
        self._matcher: GrammarMatcher | None = None
        self._is_at_start = True  # of what the grammar sees

    def for_sibling(self) -> Constraint:
        """The same grammar for another completion of the prompt."""
        return Constraint(
            self._compiled, self._vocabulary, self._label, self._endings, self._min_tokens, self._think_end
        )

    # -------------------------------------------------------------------------------------------- compilation

    def is_ready(self) -> bool:
        """Whether the request may run. False while its grammar is compiled, and for good when that failed."""
        if self._matcher is None and self.error is None and self._compiled.done():
            try:
                self._matcher = self._compiled.result().matcher()
            except BaseException as error:  # a cancelled one too
                self._fail("compile", error)
        return self._matcher is not None

    def wait(self, timeout_s: float) -> None:
        """Until the compilation has ended, one way or another, or the time is over."""
        wait((self._compiled,), timeout_s)

    def _fail(self, method: str, error: BaseException) -> None:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        self.error = f"{self._label} raised in {method}: {what}"

    # ----------------------------------------------------------------------------------------------- one step

    @property
    def num_words(self) -> int:
        """Words of a mask."""
        return len(self._end_bits)

    def fill(self, bits: NDArray[np.int32], drafts: Sequence[int] = ()) -> None:
        """Masks of the request's logits rows, bits [1 + len(drafts), num_words]: row i stands behind i drafts.

        Rows behind a draft that is refused allow everything: that draft's own row keeps them from being used.
        """
        bits[:] = _EVERYTHING
        try:
            self._fill(bits, drafts)
        except Exception as error:  # the row's token is dropped when it comes back
            bits[:] = _EVERYTHING
            self._fail("fill", error)

    def _fill(self, bits: NDArray[np.int32], drafts: Sequence[int]) -> None:
        assert self._matcher is not None, f"{self._label}: not compiled yet"
        thinking, at_start, taken = self._is_thinking, self._is_at_start, 0
        for row, draft in zip(bits, (*drafts, None), strict=True):
            self._fill_row(row, thinking, at_start)
            if draft is None or draft in self._endings or not _has(row, draft):
                break
            if thinking:
                thinking = draft != self._think_end
            else:
                taken += self._matcher.accept((draft,))
                at_start = False
        if taken:
            self._matcher.rollback(taken)

    def _fill_row(self, row: NDArray[np.int32], thinking: bool, at_start: bool) -> None:
        assert self._matcher is not None
        if thinking:  # whatever there is, but no end: the text would be missing
            row[:] = self._others
            return
        self._matcher.fill(row)
        if at_start and self._vocabulary.opening is not None:
            row &= self._vocabulary.opening
        row &= self._others  # a stop id may be a token of the text
        if self._matcher.is_accepting():
            row |= self._end_bits

    def take(self, token_ids: Sequence[int], num_output_tokens: int) -> bool:
        """Moves on by tokens that were drawn; True when the request ends here, since nothing may follow and no end of
        it may be drawn: there is none, or `min_tokens` forbids it. Sets `error` when the grammar refuses a token."""
        try:
            return (
                self.error is None
                and self._take(token_ids)
                and self._has_no_end(num_output_tokens)
                and self._nothing_may_follow()
            )
        except Exception as error:
            self._fail("accept", error)
            return False

    def _take(self, token_ids: Sequence[int]) -> bool:
        """False where the request has ended."""
        assert self._matcher is not None
        for token in token_ids:
            if self._is_thinking:
                self._is_thinking = token != self._think_end
            elif token in self._endings:
                return False
            elif self._matcher.accept((token,)):
                self._is_at_start = False
            else:
                self.error = f"{self._label} refuses token {token}, which its mask allowed"
                return False
        return True

    def _nothing_may_follow(self) -> bool:
        """Whether the text is whole, and goes on with no token, or with such alone as the request holds back: a stop id
        may be a token of the text."""
        assert self._matcher is not None
        if self._is_thinking or not self._matcher.is_accepting():
            return False
        if self._matcher.is_terminated():
            return True
        row = np.empty(self.num_words, np.int32)
        self._matcher.fill(row)
        return not (row & self._others).any()

    def _has_no_end(self, num_output_tokens: int) -> bool:
        return not self._endings or num_output_tokens < self._min_tokens


def _has(row: NDArray[np.int32], token: int) -> bool:
    return bool(row[token // 32] >> (token % 32) & 1)
