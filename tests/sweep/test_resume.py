"""`python -m framework.sweep --resume`: what it refuses."""

import json

import pytest

from framework.sweep.__main__ import main


@pytest.mark.parametrize(
    ("lock", "message"),
    [
        (None, "there is no sweep.lock.json, so nothing says what to resume"),
        ({"folder": "/no/such/place", "argv": []}, "/no/such/place, where the sweep was typed, is not there"),
    ],
)
def test_sweep_that_cannot_be_resumed_is_refused_by_name(tmp_path, capsys, lock, message):
    if lock is not None:
        (tmp_path / "sweep.lock.json").write_text(json.dumps(lock))
    with pytest.raises(SystemExit) as end:
        main(["--resume", str(tmp_path)])
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("error: ") and message in error
