"""The request table: rows arrive whole, columns are views of one packed row, block tables grow by deltas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from framework import SamplingParams, step_ops
from framework.batch import PER_32_TOKENS, PER_TOKEN, BlockDelta, Field, NewRequest
from framework.errors import PluginError
from framework.interfaces import KVGroup
from framework.worker.request_table import RequestTable

GROUPS = (KVGroup("full", block_size=4, layers=(0,)),)
FIELDS = (
    Field("k", "int32", init=7),
    Field("flag", "bool", init=True),
    Field("scale", "float32", width=3, init=1.0),
    Field("bits", "uint64"),
    Field("wide", "float32", width=100, init=-1.0),
)
NO_BLOCKS = BlockDelta(*(np.zeros(0, np.int32) for _ in range(4)))


def new(row: int, ids: list[int], computed: int = 0, seed: int = 0) -> NewRequest:
    return NewRequest(row, f"r{row}", np.array(ids, np.int32), len(ids), computed, SamplingParams(), seed)


@pytest.fixture
def table() -> RequestTable:
    made = RequestTable(5, 16, torch.device("cpu"), step_ops)
    made.declare("stage", FIELDS)
    made.allocate(GROUPS)
    return made


def test_columns_start_at_their_neutral_value(table: RequestTable) -> None:
    for field in FIELDS:
        column = table.column("stage", field.name)
        assert (column.dev == field.init).all()
        assert (column.np == field.init).all()


def test_a_row_travels_whole_at_its_admission_and_other_rows_stay(table: RequestTable) -> None:
    k, flag, scale, wide = (table.column("stage", n) for n in ("k", "flag", "scale", "wide"))
    k.np[2], flag.np[2], scale.np[2], wide.np[2] = 3, False, [1, 2, 3], 9
    k.np[3] = 99  # written, but row 3 is not admitted
    table.add(new(2, [5, 6, 7], computed=0, seed=2**64 - 1))
    table.apply()
    table.append_blocks([NO_BLOCKS])
    assert k.dev.tolist() == [7, 7, 3, 7, 7]
    assert flag.dev.tolist() == [True, True, False, True, True]
    assert scale.dev[2].tolist() == [1, 2, 3]
    assert wide.dev[2].eq(9).all()
    assert wide.dev[1].eq(-1).all()
    assert table.views.num_tokens.dev.tolist() == [0, 0, 3, 0, 0]
    assert table.views.seed.dev[2] == -1  # the same 64 bits
    assert table.token_ids[2, :3].tolist() == [5, 6, 7]


def test_block_deltas_of_several_rows_are_written_where_they_say(table: RequestTable) -> None:
    rows, starts, counts = ([1, 3], [0, 2], [2, 1])
    table.apply()
    table.append_blocks([BlockDelta(*(np.array(x, np.int32) for x in (rows, starts, counts, [8, 9, 4])))])
    assert table.block_table[0].tolist() == [[0] * 4, [8, 9, 0, 0], [0] * 4, [0, 0, 4, 0], [0] * 4]


def test_a_reused_row_keeps_no_block_of_its_former_request(table: RequestTable) -> None:
    table.add(new(2, [1, 2, 3]))
    table.apply()
    table.append_blocks([BlockDelta(*(np.array(x, np.int32) for x in ([2], [0], [3], [7, 8, 9])))])
    table.add(new(2, [4]))
    table.apply()
    table.append_blocks([BlockDelta(*(np.array(x, np.int32) for x in ([2], [0], [1], [5])))])
    assert table.block_table[0][2].tolist() == [5, 0, 0, 0]


def test_row_zero_is_nobodys(table: RequestTable) -> None:
    with pytest.raises(AssertionError, match="row 0 is reserved"):
        table.add(new(0, [1]))


def test_a_field_is_refused_when_it_is_declared_twice_or_of_an_unknown_dtype() -> None:
    table = RequestTable(2, 8, torch.device("cpu"), step_ops)
    table.declare("a", (Field("x", "int32"),))
    with pytest.raises(PluginError, match=r"field 'a\.x' is declared twice"):
        table.declare("a", (Field("x", "int32"),))
    with pytest.raises(PluginError, match="dtype 'int3'; use one of float32"):
        table.declare("a", (Field("z", "int3"),))


@pytest.mark.parametrize(("width", "widths"), [(PER_TOKEN, [31, 32, 33]), (PER_32_TOKENS, [1, 1, 2]), (7, [7] * 3)])
def test_field_may_be_as_wide_as_the_vocabulary(width: int, widths: list[int]) -> None:
    assert [Field("x", "int32", width).sized(vocab_size).width for vocab_size in (31, 32, 33)] == widths


class TestPooledField:
    """Memory as wide as the vocabulary, for rows that take it."""

    @pytest.fixture
    def pooled(self) -> RequestTable:
        made = RequestTable(6, 16, torch.device("cpu"), step_ops)
        made.declare("stage", (Field("counts", "int32", width=100, init=2, pooled=True),))
        made.allocate(GROUPS)
        return made

    def admit(self, table: RequestTable, row: int, value: int | None) -> None:
        column = table.column("stage", "counts")
        if value is not None:
            column.take(row)[:] = value
        table.add(new(row, [1]))
        table.apply()
        table.append_blocks([NO_BLOCKS])

    def held(self, table: RequestTable, row: int) -> list[int]:
        column = table.column("stage", "counts")
        return column.dev[column.slot[row]].unique().tolist()

    def test_rows_without_a_place_share_the_neutral_one(self, pooled: RequestTable) -> None:
        self.admit(pooled, 1, None)
        assert self.held(pooled, 1) == [2] and len(pooled.column("stage", "counts").dev) == 1

    def test_pool_grows_with_its_users_and_keeps_what_it_holds(self, pooled: RequestTable) -> None:
        for row in range(1, 6):
            self.admit(pooled, row, 10 * row)
        assert [self.held(pooled, row) for row in range(6)] == [[2], [10], [20], [30], [40], [50]]
        assert len(pooled.column("stage", "counts").dev) == 8

    def test_place_that_was_given_back_is_overwritten_whole(self, pooled: RequestTable) -> None:
        self.admit(pooled, 1, 7)
        pooled.column("stage", "counts").release(1)
        pooled.column("stage", "counts").take(2)[0] = 9
        self.admit(pooled, 2, None)
        assert self.held(pooled, 2) == [2, 9] and len(pooled.column("stage", "counts").dev) == 2

    def test_row_that_asks_again_keeps_its_place(self, pooled: RequestTable) -> None:
        self.admit(pooled, 1, 7)
        self.admit(pooled, 1, 8)
        assert self.held(pooled, 1) == [8] and len(pooled.column("stage", "counts").dev) == 2
