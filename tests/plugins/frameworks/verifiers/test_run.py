"""A training run whose episodes are played by verifiers."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import finished, started
from live_run import LiveRun

ENVIRONMENTS = Path(__file__).with_name("environments")
CONFIG = Path(__file__).with_name("run.toml")
RUN_S = 900.0

pytestmark = pytest.mark.timeout(1200)


def settings(python: Path, cache: Path) -> list[str]:
    values = {
        "run.import_paths": f'["{ENVIRONMENTS}"]',
        "rollouts.options.python": python,
        "policy.cache_dir": cache,
    }
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


def test_a_run_trains_what_verifiers_plays(verifiers_python: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    fault = ["--set", "rollouts.options.env.taskset.fault=sandbox"]
    command = ["train", str(CONFIG), *settings(verifiers_python, tmp_path / "cache"), *fault]
    with root.with_suffix(".out").open("wb") as out, root.with_suffix(".err").open("wb") as err:
        run = LiveRun(root, started([*command, "--output", str(root)], out, err))
    assert run.wait(RUN_S) == 0, run.stderr
    steps = run.objects("metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["tokens/trained"] > 0 for step in steps)
    assert all("reward/of/right" in step and "reward/of/metric/letters" in step for step in steps)
    (lost,) = run.events("input_poisoned")
    assert lost["fields"]["class"] == "infrastructure"
    assert lost["fields"]["cause"] == "EpisodeLost: verifiers: SandboxError: the box is gone"
    assert run.traces()
    for trace in run.traces():
        assert (trace.split, trace.index) != ("train", 2)  # lost, which is no reward of 0
        said = trace.messages[-1]["content"]
        answer = sum(int(word.strip("?")) for word in trace.messages[0]["content"].split()[::2])
        right, spoke = float(said.split()[-1:] == [str(answer)]), float(bool(said.strip()))
        assert trace.rewards["right"] == right
        assert trace.reward == 2.0 * right + 0.5 * spoke
        assert trace.success == (trace.reward >= 2.5)


def test_check_names_what_verifiers_refuses(verifiers_python: Path, tmp_path: Path) -> None:
    wrong = ["--set", "rollouts.options.env.taskset.id=no_such_taskset"]
    done = finished(["check", str(CONFIG), *settings(verifiers_python, tmp_path), *wrong], RUN_S)
    assert done.returncode == 2
    assert "no_such_taskset" in done.stderr
