"""When a worker says that it listens, the roster has its address."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_mesh.mesh.hosts import worker
from composer_mesh.mesh.hosts.roster import read_record
from composer_mesh.mesh.hosts.worker import WorkerOptions, _Worker


def test_a_worker_is_on_the_roster_before_it_says_that_it_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, bool]] = []

    def write(_: object, text: str) -> None:
        said.append((text, read_record(tmp_path, "gpu-1") is not None))

    monkeypatch.setattr(worker, "_write", write)
    monkeypatch.setattr(_Worker, "_until_it_listens", lambda *_: None)
    monkeypatch.setattr(_Worker, "_until_it_ends", lambda *_: ("told", 0))
    made = _Worker(WorkerOptions(roster=tmp_path), tmp_path)
    assert made._look_after(1, "gpu-1", "tcp://127.0.0.1:7") == 0
    assert said[0] == ("gpu-1 listens on tcp://127.0.0.1:7", True)
    assert read_record(tmp_path, "gpu-1") is None
