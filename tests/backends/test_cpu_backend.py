"""The CPU backend: dtype choice, KV memory and block operations, steps that run at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from framework.batch import StepOutput
from framework.errors import ConfigError
from framework.interfaces import Backend, BackendContext, KVSpec
from framework_backends import cpu
from framework_backends.cpu import CpuBackend


def make_backend(dtype: str = "float32", *, batch_invariant: bool = False) -> CpuBackend:
    return CpuBackend({}, BackendContext(dtype=dtype, batch_invariant=batch_invariant))


def make_kv(backend: CpuBackend) -> tuple[list[torch.Tensor], list[KVSpec]]:
    """Two layers of different layout whose block b holds the value b."""
    specs = [KVSpec((2, 3, -1, 8, 4), torch.float32, 768), KVSpec((-1, 5), torch.bfloat16, 10)]
    kv = backend.allocate_kv(specs, 6)
    numbers = torch.arange(6.0)
    kv[0].copy_(numbers.view(1, 1, 6, 1, 1).expand_as(kv[0]))
    kv[1].copy_(numbers.view(6, 1).expand_as(kv[1]))
    return kv, specs


def test_backend_meets_its_contract() -> None:
    backend = make_backend()
    assert isinstance(backend, Backend)
    assert backend.device == torch.device("cpu") and backend.max_in_flight == 1
    assert backend.buckets(8, 64) == []


@pytest.mark.parametrize("word", ("float32", "bfloat16", "float16"))
def test_dtype_is_the_one_asked_for(word: str) -> None:
    assert make_backend(word).dtype == getattr(torch, word)


def test_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"engine\.dtype='bfloat61' is not known.*float32.*Did you mean 'bfloat16'"):
        make_backend("bfloat61")


@pytest.mark.parametrize(
    ("cpuinfo", "native"),
    (
        ("flags\t\t: fpu avx512f avx512_bf16 gfni", True),
        ("flags\t\t: fpu amx_bf16 amx_tile", True),
        ("flags\t\t: fpu avx2 avx512f", False),
        ("", False),
    ),
)
def test_auto_dtype_is_bfloat16_only_where_it_is_native(
    cpuinfo: str, native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{cpuinfo}\n")
    assert cpu._multiplies_bfloat16(tmp_path / "cpuinfo") is native
    monkeypatch.setattr(cpu, "_multiplies_bfloat16", lambda path: native)
    assert cpu.choose_dtype("auto") == (torch.bfloat16 if native else torch.float32)


def test_auto_dtype_is_float32_on_a_system_without_cpuinfo(tmp_path: Path) -> None:
    assert cpu._multiplies_bfloat16(tmp_path / "absent") is False


def test_allocated_kv_is_zero_and_has_the_shape_of_its_spec() -> None:
    kv = make_backend().allocate_kv([KVSpec((2, 3, -1, 8, 4), torch.bfloat16, 384)], 7)
    assert kv[0].shape == (2, 3, 7, 8, 4) and kv[0].dtype == torch.bfloat16
    assert kv[0].count_nonzero() == 0 and kv[0].data_ptr() % 64 == 0


def test_copied_blocks_equal_their_sources_and_others_stay() -> None:
    backend = make_backend()
    kv, specs = make_kv(backend)
    backend.copy_blocks(kv, specs, [(2, 1), (1, 4)])  # block 1 is read before it is written
    assert kv[0][0, 0, :, 0, 0].tolist() == [0, 2, 2, 3, 1, 5]
    assert kv[1][:, 0].tolist() == [0, 2, 2, 3, 1, 5]


def test_copying_no_blocks_changes_nothing() -> None:
    backend = make_backend()
    kv, specs = make_kv(backend)
    backend.copy_blocks(kv, specs, [])
    assert kv[1][:, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_gathered_blocks_come_block_first_in_the_order_asked_and_scatter_back() -> None:
    backend = make_backend()
    kv, specs = make_kv(backend)
    saved = backend.gather_blocks(kv, specs, [5, 2])
    assert saved[0].shape == (2, 2, 3, 8, 4) and saved[0][:, 0, 0, 0, 0].tolist() == [5, 2]
    for tensor in kv:
        tensor.zero_()
    backend.scatter_blocks(kv, specs, [1, 3], saved)
    assert kv[0][1, 2, :, 7, 3].tolist() == [0, 5, 0, 2, 0, 0]
    assert kv[1][:, 4].tolist() == [0, 5, 0, 2, 0, 0]


def test_gathered_blocks_are_copies() -> None:
    backend = make_backend()
    kv, specs = make_kv(backend)
    saved = backend.gather_blocks(kv, specs, [3])
    kv[1].zero_()
    assert saved[1].tolist() == [[3.0] * 5]


def test_submitted_step_is_done_and_gives_its_result() -> None:
    backend = make_backend()
    collected = StepOutput(np.zeros((1, 1), np.int32), np.ones(1, np.int32))
    seen: list[int] = []
    future = backend.submit(backend.compile(lambda a, b: a + b, None), (2, 3), lambda x: seen.append(x) or collected)
    assert future.done() and not seen  # the host collects when it asks for the result, not before
    assert future.result() is collected and seen == [5]


def test_failure_of_a_step_is_raised_by_its_result() -> None:
    def fail() -> None:
        raise ValueError("step failed")

    future = make_backend().submit(fail, (), lambda value: value)
    assert future.done()
    with pytest.raises(ValueError, match="step failed"):
        future.result()
