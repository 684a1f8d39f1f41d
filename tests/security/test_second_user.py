"""A second user of the machine gets nothing from a live run with telemetry.

The user is given a list of everything that the run listens on and of every file that it has, and
tries to connect, to speak HTTP and SQL, to attach as a Monarch client, and to read.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from live_run import ENDLESS, LiveRun, composer_mesh, launched

ATTACK = Path(__file__).parent / "attacks" / "second_user.py"
ATTACK_S = 300.0
LOGIN_NODE_UMASK = 0o022


@pytest.fixture
def second_user() -> Iterator[int]:
    """A user of its own for this test."""
    name = f"cm-{uuid.uuid4().hex[:8]}"
    subprocess.run(["useradd", "--no-create-home", "--shell", "/bin/false", name], check=True)
    try:
        yield pwd.getpwnam(name).pw_uid
    finally:
        subprocess.run(["userdel", name], check=True)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter, as the homes of many login nodes."""
    folder = Path(tempfile.mkdtemp(prefix="cm-login-node-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def run(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveRun]:
    """A run that trains with telemetry, started with a login node's umask."""
    (open_folder / "tmp").mkdir(mode=0o755)
    monkeypatch.setenv("TMPDIR", str(open_folder / "tmp"))
    before = os.umask(LOGIN_NODE_UMASK)
    try:
        settings = ENDLESS | {"run.telemetry": "true"}
        with launched(open_folder / "run", open_folder / "cache", settings) as run:
            run.until_training()
            yield run
    finally:
        os.umask(before)


@dataclass(frozen=True)
class Found:
    """What root finds of a run: listening sockets, files and folders, processes."""

    unix: list[str]
    tcp: list[tuple[str, int]]
    files: list[str]
    folders: list[str]
    pids: list[int]


def found_of(run: LiveRun, folder: Path) -> Found:
    pids = run.living()
    sockets = {inode for pid in pids for inode in _inodes(pid)}
    made_here = {folder / name for name in ("tmp", "run.out", "run.err")}
    below = [path for path in folder.rglob("*") if path not in made_here]
    return Found(
        unix=[*_unix(sockets)],
        tcp=[*_tcp(sockets)],
        files=[str(path) for path in below if not path.is_dir()],
        folders=[str(path) for path in below if path.is_dir()],
        pids=pids,
    )


def _inodes(pid: int) -> Iterator[str]:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            yield target[8:-1]


def _unix(inodes: set[str]) -> Iterator[str]:
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        listens = int(fields[3], 16) & 0x10000
        if listens and fields[6] in inodes and len(fields) == 8:
            yield fields[7]


def _tcp(inodes: set[str]) -> Iterator[tuple[str, int]]:
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                yield "127.0.0.1", int(fields[1].rpartition(":")[2], 16)


def attacked(found: Found, user: int, folder: Path) -> dict[str, dict[str, str]]:
    """What the second user got."""
    own = folder / "attacker"
    own.mkdir(mode=0o777)
    own.chmod(0o777)
    done = subprocess.run(
        [sys.executable, str(ATTACK), str(user), str(own)],
        input=json.dumps(found.__dict__),
        capture_output=True,
        text=True,
        timeout=ATTACK_S,
        env={**os.environ, "TMPDIR": str(own), "HOME": str(own)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    got: dict[str, dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return got


NOTHING: dict[str, dict[str, str]] = {
    kind: {} for kind in ("silent", "from outside", "http", "sql", "files", "folders", "attached")
}
REFUSED = "HTTP/1.1 401 "


def without_refusals(got: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """What the user got, less ports that answer every request with 401: they ask for a token."""
    answers: dict[str, set[bool]] = {}
    for attempt, answer in got["http"].items():
        place = attempt.partition(") ")[0] + ")"
        answers.setdefault(place, set()).add(answer.startswith(REFUSED))
    asking = {place for place, refused in answers.items() if refused == {True}}
    open_to_all = {
        kind: {place: why for place, why in got[kind].items() if place not in asking}
        for kind in ("silent", "from outside")
    }
    http = {a: what for a, what in got["http"].items() if not what.startswith(REFUSED)}
    return got | open_to_all | {"http": http}


def test_a_second_user_gets_nothing_from_a_live_run_with_telemetry(
    run: LiveRun, second_user: int, open_folder: Path
) -> None:
    found = found_of(run, open_folder)
    assert any(name.startswith("@") for name in found.unix)  # the controller's, of Monarch
    assert any(name.endswith("/query.sock") for name in found.unix)
    assert found.tcp
    assert found.files
    assert without_refusals(attacked(found, second_user, open_folder)) == NOTHING
    for command in (
        ["query", str(run.root), "SELECT count(*) FROM actors"],
        ["tree", str(run.root)],
    ):
        done = composer_mesh(*command)
        assert (done.returncode, done.stderr) == (0, ""), command
    assert run.process.poll() is None


UNGUARDED = """
import sys, time
from monarch.actor import this_host
from monarch._src.actor.host_mesh import _spawn_admin
_spawn_admin([this_host()], "127.0.0.1:0").get()
sys.stderr.write("ready\\n")
time.sleep(600)
"""


def test_the_same_attacks_succeed_on_monarch_without_the_guard(
    second_user: int, open_folder: Path
) -> None:
    """So that the attacks of the other test are known to be attacks."""
    command = [sys.executable, "-c", UNGUARDED]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert any(line == "ready\n" for line in process.stderr)
            sockets = set(_inodes(process.pid))
            found = Found([*_unix(sockets)], [*_tcp(sockets)], [], [], [process.pid])
            got = attacked(found, second_user, open_folder)
        finally:
            process.kill()
    assert {text.partition("(")[0] for text in got["attached"].values()} == {"uid=0"}
    assert set(got["silent"].values()) == {"waits for us"}
    assert set(got["from outside"].values()) == {"waits for us"}
    assert any("/v1/tree" in attempt for attempt in got["http"])
