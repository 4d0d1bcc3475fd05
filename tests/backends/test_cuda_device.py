"""What keeps a device from being used is an error with its cause; a machine without one runs on its processor."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from framework.errors import ConfigError
from framework.plugins import Registry
from framework_backends import cuda_device


@pytest.fixture
def device_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = tmp_path / "nvidia0"
    node.touch()
    monkeypatch.setattr(cuda_device, "_NODES", (str(node),))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def auto_backend() -> str:
    return Registry.load().auto("backend").name


@pytest.mark.parametrize("hiding", ["", " ", "-1"])
def test_hidden_devices_are_none(hiding: str, device_there: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hiding)
    assert "hides every device" in str(cuda_device.probe())
    assert auto_backend() == "cpu"


def test_machine_without_a_device_runs_on_its_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda_device, "_NODES", (str(tmp_path / "nothing"),))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cuda_device.probe() == "no NVIDIA device is there"
    assert auto_backend() == "cpu"
    with pytest.raises(ConfigError, match=r"backend=cuda: no NVIDIA device is there\. .* say backend=cpu"):
        cuda_device.open_device()


def test_auto_takes_a_device_that_is_there(device_there: None) -> None:
    assert cuda_device.probe() is None
    assert auto_backend() == "cuda"


def test_torch_without_cuda_is_named(device_there: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=rf"torch {torch.__version__.partition('+')[0]}.* is built without CUDA"):
        cuda_device.open_device()


def test_missing_triton_is_named_with_the_command_that_installs_it(
    device_there: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda_device, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"triton.* pip install 'framework\[cuda\]'"):
        cuda_device.open_device()


def test_driver_that_does_not_answer_is_named(device_there: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\nmore of it")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda_device, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "init", fail)
    with pytest.raises(ConfigError, match=r"backend=cuda: The NVIDIA driver on your system is too old\. .*nvidia-smi"):
        cuda_device.open_device()


def test_another_device_than_the_first_one_is_refused(device_there: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda_device, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with pytest.raises(ConfigError, match=r"device is cuda:1, .*\. Choose a device by CUDA_VISIBLE_DEVICES"):
        cuda_device.open_device()


def test_old_device_is_named(device_there: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda_device, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    with pytest.raises(ConfigError, match=r"Tesla V100 has compute capability 7\.0"):
        cuda_device.open_device()
