"""Twelve mistakes of a new user: each ends in at most 12 lines that name cause and repair."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from commands import finished
from live_run import SHORT
from werkzeug import Request, Response
from werkzeug.serving import make_server

MOST_LINES = 12
FLAT = {"data__task": "sums.py:Sums", "environment__tool_error_penalty": 0}
LIMIT_S = 400.0

SUMS = """\
import random

from composer_mesh import Row, Task, Transcript, reward


class Sums(Task):
    def generate(self, rng: random.Random) -> Row:
        return {"question": f"What is {rng.randint(1, 99)} plus 2?"}

    def prompt(self, row: Row) -> str:
        return row["question"]

    def expert(self, messages):
        return "5"

    def corrupted(self, messages, rng):
        return "6"

    @reward
    def same(self, transcript: Transcript) -> float:
        return 0.5
"""
LOSS = """\
from composer_mesh import LossInputs, LossOutputs


def my_loss(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(loss=-inputs.trainer_logprob.sum())
"""


def run(folder: Path, *words: str, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """The exit status, output and errors of a command that is run in a folder."""
    done = finished(words, LIMIT_S, folder, {**os.environ, **(env or {})})
    return done.returncode, done.stdout, done.stderr


def changes(**values: Any) -> list[str]:
    """The words of short runs."""
    given = {**SHORT, **{name.replace("__", "."): value for name, value in values.items()}}
    return [word for name, value in given.items() for word in ("--set", f"{name}={value}")]


def check_refusal(found: tuple[int, str, str], *parts: str) -> None:
    code, _, errors = found
    assert code != 0
    assert 0 < len(errors.splitlines()) <= MOST_LINES, errors
    for part in parts:
        assert re.search(part, errors), f"{part!r} is not in:\n{errors}"


@pytest.fixture
def unauthorized() -> Iterator[str]:
    """The base URL of a teacher that accepts no key."""

    def refuse(_: Request) -> Response:
        body = '{"error": {"message": "Incorrect API key provided"}}'
        return Response(body, 401, content_type="application/json")

    server = make_server("127.0.0.1", 0, Request.application(refuse), threaded=True)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()


def teachers(url: str) -> str:
    """The teachers of a config: three that cost a dollar for a million tokens."""
    price = "prompt_usd_per_million=1.0, completion_usd_per_million=1.0"
    of_each = f'kind="openai", base_url="{url}", model="m", api_key_env="TEACHER_KEY", {price}'
    return (
        "["
        + ", ".join(f'{{name="{name}", {of_each}}}' for name in ("alpha", "beta", "gamma"))
        + "]"
    )


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("train", "quickstart", "--set", "lr=1e-4"), (r"did you mean trainer\.lr",)),
        (("trian", "quickstart"), ("'trian' is not a command: did you mean train",)),
        (
            ("train", "quickstart", "--set", "policy.path=/nowhere"),
            ("must be a model folder", "correct the path"),
        ),
        (
            ("check", "quickstart", "--set", "policy.chat_template=no.jinja"),
            (r"policy\.chat_template", r"no\.jinja"),
        ),
        (("stacks", "nothing"), ("nothing", "composer-mesh train")),
    ],
    ids=["wrong key", "misspelled command", "model folder", "template", "no run"],
)
def test_a_mistyped_name_is_refused(tmp_path: Path, words: Any, parts: Any) -> None:
    check_refusal(run(tmp_path, *words), *parts)


def test_a_bug_in_a_loss_is_shown_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "my_loss.py").write_text(LOSS)
    loss = 'loss={type="custom", import_path="my_loss.my_loss"}'
    paths = 'run.import_paths=["."]'
    found = run(tmp_path, "check", "quickstart", "--set", loss, "--set", paths)
    check_refusal(found, r"my_loss\.py:5, in my_loss", "did you mean 'trainer_logprobs'")


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import importlib.util\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'peft' "
        "else found(name, *more)\n"
    )
    paths = os.pathsep.join([str(hidden), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = ("check", "quickstart", "--set", "trainer.lora={rank=4}")
    found = run(tmp_path, *words, env={"PYTHONPATH": paths})
    check_refusal(found, r"pip install 'composer-mesh\[lora\]'")


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        found = run(tmp_path, "dashboard", "runs", "--port", port)
    check_refusal(found, f"port {port}", "another --port")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk of its own")
def test_a_full_disk_is_one_message(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    inner = 'mount -t tmpfs -o size=40k none "$1" || exit 77; shift; exec "$@"'
    command = ["unshare", "-m", "sh", "-c", inner, "sh", str(disk), sys.executable]
    words = ["-m", "composer_mesh", "train", "quickstart", "--output", str(disk / "run")]
    done = subprocess.run(
        [*command, *words, *changes()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no disk can be mounted here: {done.stderr[-200:]}")
    check_refusal((done.returncode, done.stdout, done.stderr), "full", "free the disk")


def test_a_killed_run_says_how_it_is_resumed(tmp_path: Path, policy_cache: Path) -> None:
    words = [sys.executable, "-m", "composer_mesh", "train", "quickstart", "--output", "run"]
    started = subprocess.Popen(
        [
            *words,
            *changes(run__steps=1000, replay__actors=1, eval__episodes=2),
            *("--set", f"policy.cache_dir={policy_cache}"),
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert started.stdout is not None
    for line in started.stdout:
        if "step=1/" in line:
            break
    started.send_signal(signal.SIGKILL)
    started.wait(LIMIT_S)
    started.stdout.close()
    found = run(tmp_path, "stacks", "run")
    check_refusal(found, "killed", r"composer-mesh train .*--resume")


@pytest.mark.parametrize("mistake", ["401", "budget", "flat rewards"])
def test_a_channel_that_does_nothing_says_why(
    tmp_path: Path, policy_cache: Path, unauthorized: str, mistake: str
) -> None:
    (tmp_path / "sums.py").write_text(SUMS)
    paid = {"replay__teachers": teachers(unauthorized), "policy__cache_dir": policy_cache}
    settings: dict[str, Any] = {
        "401": {**paid, "replay__budget__usd": 1.0},
        "budget": {**paid, "replay__budget__usd": 0.000001},
        "flat rewards": {**FLAT, "replay__beta": 0},
    }[mistake]
    said = {
        "401": ("teacher_failing", "401", "check the key", "replay.*active in 0 of"),
        "budget": ("budget_reached", r"raise replay\.budget\.usd", "replay.*active in 0 of"),
        "flat rewards": ("groups_flat", r"raise schedule\.group_size", "policy.*active in 0 of"),
    }[mistake]
    words = ("train", "quickstart", "--output", "run", *changes(**settings))
    code, output, errors = run(tmp_path, *words, env={"TEACHER_KEY": "wrong"})
    assert code == 0, errors
    warned = [line for line in output.splitlines() if " warning " in line]
    assert 0 < len(warned) <= MOST_LINES
    for part in said:
        assert re.search(part, output, re.DOTALL), f"{part!r} is not in:\n{output}"
