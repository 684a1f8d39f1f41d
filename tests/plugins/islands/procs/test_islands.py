"""Islands as users start them, killed and resumed; and processes killed over a folder and S3."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from commands import started
from islands_kills import killed_islands
from islands_s3 import BUCKET, s3_program, s3_server
from live_run import PRESET, RUN_DEADLINE_S, SHORT, composer_mesh, wait_until
from safetensors.numpy import load_file

from composer_mesh.services.directory.report import read_metrics
from composer_mesh.services.directory.status import read_status
from composer_mesh.services.launch.by_ssh import lives, pid_of
from composer_mesh.services.launch.handle import read_handle

SETTINGS = SHORT | {
    "replay.actors": 1,
    "trainer.checkpoint_every": 1,
    "islands.steps_per_round": 2,
    "islands.deadline_s": 5.0,
}


def words(folder: Path, cache: Path, **settings: object) -> list[str]:
    values = SETTINGS | {"policy.cache_dir": cache, **settings}
    sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    where = ["-n", "2", "--store", f"file://{folder}/store", "--output", str(folder / "all")]
    return ["islands", str(PRESET), *sets, *where]


def weights(run: Path, step: int) -> dict[str, object]:
    return load_file(run / "checkpoints" / f"step-{step}" / "model.safetensors")


def test_two_islands_train_to_common_weights_and_one_summary(
    tmp_path: Path, policy_cache: Path
) -> None:
    settings = {"islands.quantization": "int8", "islands.deadline_s": RUN_DEADLINE_S}
    done = composer_mesh(*words(tmp_path, policy_cache, **settings, **{"run.steps": 4}))

    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "all" / "summary.json").read_text())
    assert (summary["islands"], summary["finished"], summary["steps"]) == (2, 2, 8)
    assert (summary["round"], summary["lost"]) == (2, 0)
    assert summary["eval"]["final"]["episodes"] == 2 * SHORT["eval.episodes"]
    one, two = (weights(tmp_path / "all" / f"island-{rank}", 4) for rank in (0, 1))
    assert list(one) == list(two)
    assert all((one[name] == two[name]).all() for name in one)  # type: ignore[attr-defined]


def _kill(run: Path) -> None:
    """End every process of a launched run at once."""
    handle = read_handle(run)
    assert handle is not None
    os.killpg(pid_of(handle.job), signal.SIGKILL)
    wait_until(lambda: not lives(handle.job), "end of the controller", RUN_DEADLINE_S)


def test_an_island_that_is_killed_is_not_waited_for_and_comes_back(
    tmp_path: Path, policy_cache: Path
) -> None:
    settings = {"run.steps": 12, "trainer.lr_schedule": "constant", "islands.absent_after": 1}
    runs = [tmp_path / "all" / f"island-{rank}" for rank in (0, 1)]
    with (tmp_path / "out").open("wb") as out:
        command = started(words(tmp_path, policy_cache, **settings), out, out)
        try:
            wait_until(
                lambda: len(read_metrics(runs[1] / "metrics.jsonl")) >= 3, "step 3", RUN_DEADLINE_S
            )
            told = json.loads(composer_mesh("tree", str(tmp_path / "all"), "--json").stdout)
            assert [one["rank"] for one in told["islands"]] == [0, 1]
            assert {one["mesh"]["run"] for one in told["islands"]} == {"island-0", "island-1"}
            _kill(runs[1])
            assert command.wait(RUN_DEADLINE_S) == 1
        finally:
            command.kill()
            command.wait()
    there = read_status(runs[0])
    assert there is not None
    assert there.state == "finished"
    assert "island 1 failed" in (tmp_path / "out").read_text()

    again = composer_mesh(*words(tmp_path, policy_cache, **settings), "--resume")

    assert again.returncode == 0, again.stderr
    assert "island 0: nothing to do" in again.stderr
    assert len(read_metrics(runs[1] / "metrics.jsonl")) == 12
    summary = json.loads((tmp_path / "all" / "summary.json").read_text())
    assert (summary["finished"], summary["steps"]) == (2, 24)


def test_processes_killed_at_random_moments_never_average_wrongly(tmp_path: Path) -> None:
    found = killed_islands(f"file://{tmp_path}/store", tmp_path / "f", kills=4, seed=7, steps=40)

    assert (found.wrong, found.hangs, found.steps_missing) == ([], 0, 0)
    assert found.kills >= 2  # of four; a test that stands still for long kills fewer
    assert 20 <= found.rounds <= 20 + found.absences  # who fell behind ends in later rounds


def test_so_it_is_over_a_real_s3_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = s3_program()
    if program is None:
        pytest.skip("no S3 server is installed: nox -s islands")
    with s3_server(program, tmp_path / "log") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        found = killed_islands(f"s3://{BUCKET}/x", tmp_path / "f", kills=4, seed=8, steps=40)

    assert (found.wrong, found.hangs, found.steps_missing) == ([], 0, 0)
    assert found.kills >= 2  # of four; a test that stands still for long kills fewer
    assert 20 <= found.rounds <= 20 + found.absences  # who fell behind ends in later rounds
