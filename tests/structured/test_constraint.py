"""One request's grammar: which ids end it, when it thinks, what drafts see, what becomes of a broken matcher."""

from concurrent.futures import Future

import numpy as np
import pytest

from framework.structured.constraint import Constraint
from framework.structured.vocabulary import Vocabulary, bits_of

from .crafted import END, STOP, THINK_END, Counting, ids_of

LETTERS = [3, 4, 5]


class Compiled:
    def __init__(self, **options):
        self.options, self.made = options, []

    def matcher(self):
        self.made.append(Counting(**self.options))
        return self.made[-1]


def constraint(vocabulary, *, endings=(END,), min_tokens=0, think_end=None, compiled=None, **options):
    future = Future()
    future.set_result(compiled or Compiled(**options))
    made = Constraint(future, vocabulary, "grammar 'counting'", frozenset(endings), min_tokens, think_end)
    assert made.is_ready()
    return made


def masks(made, drafts=()):
    bits = np.zeros((1 + len(drafts), made.num_words), np.int32)
    made.fill(bits, drafts)
    return [ids_of(row) for row in bits]


def test_request_may_end_only_where_the_text_is_whole(vocabulary):
    made = constraint(vocabulary, endings=(END, STOP, 7))
    for count in range(1, 4):
        assert masks(made) == [LETTERS]
        assert not made.take([3], count)
    assert masks(made) == [[END, STOP, 7]]


def test_stop_id_that_is_a_token_of_the_text_waits_for_its_end(vocabulary):
    made = constraint(vocabulary, endings=(END, 4))
    assert masks(made) == [[3, 5]]
    made.take([3, 5, 3], 3)
    assert masks(made) == [[END, 4]]


def test_whole_text_ends_the_request_where_no_id_may(vocabulary):
    assert constraint(vocabulary, endings=()).take([3, 4, 5], 3)
    assert constraint(vocabulary, min_tokens=4).take([3, 4, 5], 3)
    assert not constraint(vocabulary, min_tokens=3).take([3, 4, 5], 3)
    assert not constraint(vocabulary, endings=()).take([3, 4], 2)


def test_text_that_goes_on_with_a_stop_id_alone_is_over_where_no_end_may_be_drawn(vocabulary):
    class Longer(Counting):
        """Whole behind each token; 4 is the only one that may follow on 3."""

        def fill(self, row):
            row[:] = bits_of([4] if self.taken else [3], 32 * len(row))

        def is_accepting(self):
            return bool(self.taken)

        def is_terminated(self):
            return False

    class Made(Compiled):
        def matcher(self):
            return Longer()

    assert constraint(vocabulary, endings=(END, 4), min_tokens=5, compiled=Made()).take([3], 1)
    assert not constraint(vocabulary, endings=(END, 4), min_tokens=1, compiled=Made()).take([3], 1)
    assert not constraint(vocabulary, endings=(END,), min_tokens=5, compiled=Made()).take([3], 1)


def test_nothing_is_taken_behind_the_id_that_ends_the_request(vocabulary):
    compiled = Compiled()
    made = constraint(vocabulary, compiled=compiled)
    assert not made.take([3, 4, 5, END], 4)
    assert compiled.made[0].taken == [3, 4, 5] and made.error is None


# ---------------------------------------------------------------------------------------------------- thinking


def test_grammar_holds_behind_the_end_of_thinking_and_thinking_cannot_end_the_request(vocabulary):
    made = constraint(vocabulary, think_end=THINK_END)
    assert masks(made) == [[i for i in range(39) if i != END]]
    assert not made.take([20, 21, THINK_END], 3)
    assert masks(made) == [LETTERS]


def test_case_c10_chunk_that_ends_the_thinking_is_held_against_the_grammar(vocabulary):
    compiled = Compiled()
    made = constraint(vocabulary, think_end=THINK_END, compiled=compiled)
    free = [i for i in range(39) if i != END]
    drafts = [20, 21, THINK_END, 3, 9]
    assert masks(made, drafts)[:5] == [free, free, free, LETTERS, LETTERS]
    assert compiled.made[0].taken == []  # rolled back exactly
    made.take([20, 21, THINK_END, 3], 4)  # 9 was refused by its row
    assert masks(made) == [LETTERS] and compiled.made[0].taken == [3]


def test_thinking_of_a_sibling_begins_anew(vocabulary):
    made = constraint(vocabulary, think_end=THINK_END)
    before, sibling = masks(made), made.for_sibling()
    made.take([THINK_END, 3], 2)
    assert sibling.is_ready() and masks(sibling) == before


# ------------------------------------------------------------------------------------------------------ drafts


def test_each_row_stands_behind_its_drafts_and_the_matcher_where_it_was(vocabulary):
    compiled = Compiled()
    made = constraint(vocabulary, compiled=compiled)
    assert masks(made, [3, 4, 5]) == [LETTERS, LETTERS, LETTERS, [END]]
    assert compiled.made[0].taken == [] and masks(made) == [LETTERS]


def test_case_c16_allowed_ids_after_drafts_with_an_ending_are_those_before(vocabulary):
    made = constraint(vocabulary)
    made.take([3], 1)
    before = masks(made)
    rows = masks(made, [4, 5, END, 3])
    assert rows[:3] == [LETTERS, LETTERS, [END]]
    assert masks(made) == before


def test_draft_that_its_row_refuses_is_not_given_to_the_matcher(vocabulary):
    rows = masks(constraint(vocabulary, refuses=[9]), [9, 3])
    assert rows[0] == LETTERS and 9 not in rows[0]


def test_padding_and_ids_without_a_token_are_never_allowed(vocabulary):
    class Sloppy(Counting):
        def fill(self, row):
            row[:] = -1

    class Everything(Compiled):
        def matcher(self):
            return Sloppy()

    made = constraint(vocabulary, compiled=Everything())
    assert masks(made) == [[i for i in range(39) if i != END]]


def test_token_that_loses_its_space_at_the_beginning_of_a_text_does_not_begin_one():
    vocabulary = Vocabulary([b"", b"", b"", b" a", b"a", b"b"], bits_of(range(6), 6), bits_of([4, 5], 6))
    made = constraint(vocabulary)
    assert masks(made) == [[4, 5]]
    made.take([4], 1)
    assert masks(made) == [LETTERS]


# ------------------------------------------------------------------------------------------------------ faults


@pytest.mark.parametrize("method", ["fill", "accept"])
def test_matcher_that_raises_ends_its_request_with_its_words(vocabulary, method):
    made = constraint(vocabulary, fails_in=method)
    assert len(masks(made)[0]) in (3, 64)
    assert not made.take([3], 1)
    assert made.error == f"grammar 'counting' raised in {method}: RuntimeError: {method} is broken"


def test_token_that_the_matcher_refuses_against_its_mask_is_an_error(vocabulary):
    made = constraint(vocabulary, refuses=[4])
    assert not made.take([4], 1)
    assert made.error == "grammar 'counting' refuses token 4, which its mask allowed"


def test_failed_compilation_is_an_error_and_the_request_never_ready(vocabulary):
    future = Future()
    made = Constraint(future, vocabulary, "grammar 'x'", frozenset(), 0, None)
    assert not made.is_ready() and made.error is None
    future.set_exception(ValueError("too large"))
    assert not made.is_ready() and made.error == "grammar 'x' raised in compile: ValueError: too large"
