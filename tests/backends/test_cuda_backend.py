"""The CUDA backend without a device: what becomes of steps that fail on their way there."""

from __future__ import annotations

import pytest
import torch


def test_a_failed_step_comes_back_when_the_device_has_done_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that the step was told from is written anew once it has come back."""
    pytest.importorskip("triton")
    from framework_backends.cuda import FailedStep

    pending = ["a copy from pinned memory"]

    def synchronize(device: torch.device) -> None:
        assert device.index == 0
        pending.clear()
        raise RuntimeError("CUDA error: what the device says of it later")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    step = FailedStep(ValueError("the cause"), torch.device("cuda", 0))
    assert step.done()
    with pytest.raises(ValueError, match="the cause"):
        step.result()
    assert not pending
