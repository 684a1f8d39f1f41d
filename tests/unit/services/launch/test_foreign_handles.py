"""A launch.json is a stranger's until its signature says otherwise, and then still only data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_programs import FakePrograms, fake_programs

from composer_mesh.services.cli import main
from composer_mesh.services.directory.claim import KEY_FILE, key_folder, sign
from composer_mesh.services.directory.resume import LAUNCH_FILE
from composer_mesh.services.directory.status import RunUnavailable
from composer_mesh.services.launch.by_ssh import HostsLauncher
from composer_mesh.services.launch.handle import (
    HandleNotOurs,
    read_handle,
    refuse_unstorable,
    write_handle,
)
from composer_mesh.services.launch.ports import Handle, LaunchRefused

COMMANDS = [
    ["tree", "run"],
    ["events", "run"],
    ["stacks", "run"],
    ["tui", "run"],
    ["traces", "run"],
    ["verify", "run"],
    ["reward", "run", "t", "1"],
    ["scale", "run", "generator=2"],
    ["join", "run", "tls://10.0.0.7:1"],
    ["stop", "run"],
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePrograms:
    fakes = fake_programs(tmp_path / "bin", monkeypatch)
    fakes.ssh()
    return fakes


def about(**changes: Any) -> dict[str, Any]:
    """What `launch` would write about a run on a host that ssh reaches."""
    fields: dict[str, Any] = {
        "kind": "hosts",
        "run": "/far/run",
        "job": "1",
        "python": "python",
        "folder": "/far",
        "log": None,
        "destination": "far",
        "options": [],
        "setup": [],
        "context": "",
        "namespace": "",
    }
    return fields | changes


def write(run: Path, fields: dict[str, Any], signed: bool) -> None:
    content = json.dumps(fields).encode()
    (run / LAUNCH_FILE).write_bytes(content)
    if signed:
        sign(run / LAUNCH_FILE, content)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_no_command_runs_what_a_strangers_launch_json_says(
    run: Path, fakes: FakePrograms, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    mark = run / "it ran"
    planted = {"reach": ["touch", str(mark)], "kind": "hosts", "job": "1", "python": "python"}
    for fields in (planted, about(), about(kind="slurm", job="1", setup=[f"touch '{mark}'"])):
        write(run, fields, signed=False)
        assert main(words) != 0
        said = capsys.readouterr().err.splitlines()
        assert any("was not written by composer-mesh launch of this account" in s for s in said)
        assert not any("Traceback" in line for line in said)
    assert not mark.exists()
    assert fakes.said("ssh") == []


def test_a_handle_that_was_changed_or_moved_to_another_name_is_a_strangers(run: Path) -> None:
    folder = Path("/far")
    write_handle(run, Handle("hosts", folder, "1", "python", folder, destination="far"))
    assert read_handle(run) is not None
    file = run / LAUNCH_FILE
    before = file.read_bytes()
    file.write_bytes(before.replace(b'"far"', b'"fat"'))
    with pytest.raises(HandleNotOurs):
        read_handle(run)
    sign(run / "config.toml", before)
    (run / ".config.toml.signature").replace(run / ".launch.json.signature")
    file.write_bytes(before)
    with pytest.raises(HandleNotOurs):
        read_handle(run)


def test_the_key_is_read_by_its_owner_only_and_a_shared_one_signs_nothing(run: Path) -> None:
    write(run, about(), signed=True)
    key = key_folder() / KEY_FILE
    assert key.stat().st_mode & 0o777 == 0o600
    key.chmod(0o640)
    try:
        with pytest.raises(HandleNotOurs):
            read_handle(run)
    finally:
        key.chmod(0o600)
    assert read_handle(run) is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"destination": "-oProxyCommand=touch x"},
        {"destination": "far;touch x"},
        {"destination": "far", "options": ["-o", "ProxyCommand=touch x"]},
        {"destination": "far", "options": ["-oProxyCommand=touch x"]},
        {"destination": "far", "options": ["-o", "proxycommand touch x"]},
        {"destination": "far", "options": ["-F", "/tmp/config"]},
        {"destination": "far", "options": ["-i", "-oProxyCommand=x"]},
        {"python": "-c"},
        {"python": "A=b"},
        {"python": "a\nb"},
        {"folder": "relative"},
        {"job": "1; touch x"},
        {"job": "-1"},
        {"kind": "slurm", "job": "--help"},
        {"kind": "kubernetes", "job": "a b"},
        {"kind": "kubernetes", "job": "a", "namespace": "--all"},
        {"kind": "kubernetes", "job": "a", "context": "--kubeconfig=/tmp/x"},
        {"kind": "other"},
        {"reach": ["sh"]},
        {"run": 5},
    ],
    ids=str,
)
def test_even_a_signed_handle_holds_only_plain_fields(run: Path, changes: dict[str, Any]) -> None:
    write(run, about(**changes), signed=True)
    with pytest.raises(RunUnavailable, match="restore it from a copy") as error:
        read_handle(run)
    assert not isinstance(error.value, HandleNotOurs)
    assert "\n" not in str(error.value)


def test_options_that_run_no_program_are_stored_and_used(run: Path) -> None:
    options = ("-i", "/keys/a b", "-p", "2222", "-o", "ProxyJump=me@gate", "-x")
    refuse_unstorable("me@far.example", options)
    handle = Handle("hosts", run, "1", "python", run, destination="me@far.example", options=options)
    write_handle(run, handle)
    assert read_handle(run) == handle
    assert HostsLauncher().reach(handle)[: len(options) + 1] == ("ssh", *options)
    with pytest.raises(LaunchRefused, match="ssh/config"):
        refuse_unstorable("far", ["-F", "/tmp/config"])
