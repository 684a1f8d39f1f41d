"""A run on hosts at addresses: who starts which worker, with which words, and what is refused.

Workers inherit no key from where they are launched.
"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fake_programs import FakePrograms, fake_programs
from repository import ROOT

from composer_mesh.configs.load import load_config
from composer_mesh.planning.placement_solver import described_hosts
from composer_mesh.services.launch.by_ssh import HostsLauncher, end, lines_of, lives, name_of
from composer_mesh.services.launch.handle import inside, left_behind
from composer_mesh.services.launch.ports import LaunchFailed, LaunchRefused, Order
from composer_mesh.services.launch.workers import CONTROLLER, worker_command, workers_of

FAR = ("tls://192.0.2.5:22300", "tls://192.0.2.6:22300")  # RFC 5737: nobody has these
NEAR = ("tcp://127.0.0.1:22301", "tcp://127.0.0.1:22302")
AWKWARD = "a $(touch no) 'b\" &"


def order_of(build_config: Any, root: Path, python: str = "python", **cluster: Any) -> Order:
    config = build_config(cluster={"kind": "hosts", **cluster})
    (root / "launch").mkdir(parents=True, exist_ok=True)
    hosts = described_hosts(config.placement)
    return Order(config, hosts, root, root.parent, python)


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePrograms:
    return fake_programs(tmp_path / "bin of fakes", monkeypatch)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run's directory whose name no shell would leave alone."""
    return tmp_path / AWKWARD / "run"


def test_a_text_for_ssh_means_the_same_behind_a_shell(tmp_path: Path) -> None:
    folder = tmp_path / AWKWARD
    folder.mkdir()
    words = ["printf", "%s\n", "$HOME", "a  b", "it's", "`x`", ""]
    for text in (inside(folder, words), inside(folder, ["pwd"])):
        done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True)
        told = str(folder) if "printf" not in text else "\n".join(words[2:])
        assert done.stdout == f"{told}\n"
    assert not (tmp_path / "no").exists()


def test_what_is_left_behind_tells_its_process_and_keeps_nothing_open(tmp_path: Path) -> None:
    folder, log = tmp_path / AWKWARD, tmp_path / "its log"
    folder.mkdir()
    text = left_behind(folder, ["sh", "-c", "pwd; echo $$; exec sleep 600"], log)
    # It returns although what it started goes on: no stream is kept.
    done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True)
    name = name_of(int(done.stdout))
    written = lines_of(log, lambda: lives(name))
    assert [next(written), next(written)] == [str(folder), done.stdout.strip()]
    end(name, 10.0)
    assert not lives(name)


def test_workers_on_loopback_are_ours_and_end_with_the_controller(
    build_config: Any, root: Path
) -> None:
    order = order_of(build_config, root, workers=NEAR)
    controller, *workers = HostsLauncher().plan(order).commands
    assert controller[:5] == ["python", "-P", "-m", "composer_mesh", "train"]
    for number, (command, address) in enumerate(zip(workers, NEAR, strict=True)):
        assert command[:7] == ["python", "-P", "-m", "composer_mesh", "worker", "--listen", address]
        assert command[command.index("--name") + 1] == f"host-{number}"
        assert command[command.index("--with-process") + 1] == CONTROLLER
        assert "--authority" not in command  # tcp


def test_without_ssh_workers_elsewhere_are_expected(build_config: Any, root: Path) -> None:
    order = order_of(build_config, root, workers=FAR, lease_s=7, attach_s=99)
    plan = HostsLauncher().plan(order)
    assert len(plan.commands) == 1  # the controller, here
    (first, _) = workers_of(order)
    assert first.expected
    command = first.command(order)
    assert command[command.index("--authority") + 1] == str(root / ".tls")
    assert command[command.index("--roster") + 1] == str(root / "hosts")
    assert command[command.index("--lease") + 1] == "7"
    assert command[command.index("--wait") + 1] == "99"
    assert "--with-process" not in command


def test_by_ssh_workers_and_controller_are_left_behind_on_their_hosts(
    build_config: Any,
    root: Path,
    fakes: FakePrograms,
) -> None:
    fakes.ssh()
    python = str(fakes.python())
    ssh = {"destinations": ["me@one", "two"], "options": ["-i", "/keys/a b"]}
    order = order_of(build_config, root, python, workers=FAR, ssh=ssh)
    plan = HostsLauncher().plan(order)
    assert [command[0] for command in plan.commands] == ["ssh"] * 3
    handle = HostsLauncher().submit(order, plan)
    # Exactly what the plan says was run, in its order.
    assert fakes.said("ssh") == [list(command[1:]) for command in plan.commands]
    assert [call[:2] for call in fakes.said("ssh")] == [["-i", "/keys/a b"]] * 3
    assert [call[-3] for call in fakes.said("ssh")] == ["me@one", "two", "me@one"]
    try:
        assert HostsLauncher().reach(handle)[-2:] == ("me@one", "--")
        assert HostsLauncher().state(handle)[0] == "running"
        detached_calls(fakes, 3)
        heads = sorted(call[4] for call in fakes.called())
        assert heads == ["train", "worker", "worker"]
        assert all(call[0] == str(root.parent) for call in fakes.called())
    finally:
        HostsLauncher().stop(handle, 5.0)
        for path in fakes.folder.glob("python.log.called.*"):
            end(name_of(int(path.suffix[1:])), 5.0)
    assert HostsLauncher().state(handle)[0] == "ended"


def detached_calls(fakes: FakePrograms, count: int) -> None:
    """Wait until so many programs have said that they were called."""
    for _ in lines_of(Path("/nowhere"), lambda: len(fakes.called()) < count):
        raise AssertionError


def test_a_host_that_ssh_does_not_reach_ends_the_launch_in_its_own_words(
    build_config: Any,
    root: Path,
    fakes: FakePrograms,
) -> None:
    fakes.ssh()
    fakes.no_route()
    order = order_of(build_config, root, workers=FAR, ssh={})
    with pytest.raises(LaunchFailed, match="No route to host"):
        HostsLauncher().submit(order, HostsLauncher().plan(order))
    assert len(fakes.said("ssh")) == 1
    assert fakes.said("ssh")[0][-3] == "192.0.2.5"


def test_with_a_tunnel_each_worker_is_in_the_ssh_that_carries_it(
    build_config: Any, root: Path
) -> None:
    ssh = {"destinations": ["one", "two"], "tunnel": True}
    order = order_of(build_config, root, workers=NEAR, address="tcp://127.0.0.1:22300", ssh=ssh)
    first, second, controller = HostsLauncher().plan(order).commands
    assert controller[0] == "python"  # here
    for command, own, other in ((first, 22301, 22302), (second, 22302, 22301)):
        forwards = [word for word in command if word.startswith("127.0.0.1:")]
        assert forwards[0] == f"127.0.0.1:{own}:127.0.0.1:{own}"
        assert {f"127.0.0.1:{port}:127.0.0.1:{port}" for port in (other, 22300)} == set(
            forwards[1:]
        )
        assert "-N" not in command
        assert "composer_mesh worker" in shlex.split(command[-1])[2]


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({"workers": ("tls://10.0.0.5:0",)}, "has tls://10.0.0.5:0, but nobody would know"),
        ({"workers": FAR, "ssh": {"destinations": ["one"]}}, "has 1 hosts but .* 2 addresses"),
        ({"workers": FAR[:1], "ssh": {"destinations": ["-oX=y"]}}, "'-oX=y', which ssh would not"),
        ({"workers": NEAR, "ssh": {"tunnel": True}}, "destinations is empty"),
        (
            {"workers": NEAR, "ssh": {"tunnel": True, "destinations": ["a", "b"]}},
            "cluster.address is not set",
        ),
        (
            {
                "workers": FAR,
                "address": "tls://127.0.0.1:1",
                "ssh": {"tunnel": True, "destinations": ["a", "b"]},
            },
            "tls://192.0.2.5:22300 is not on loopback",
        ),
        (
            {
                "workers": NEAR,
                "address": "tcp://127.0.0.1:1",
                "ssh": {"tunnel": True, "destinations": ["a", "a"]},
            },
            "destination of 2 hosts",
        ),
    ],
)
def test_hosts_that_cannot_be_reached_so_are_refused_with_the_repair(
    build_config: Any, tmp_path: Path, cluster: dict[str, Any], words: str
) -> None:
    with pytest.raises(LaunchRefused, match=words):
        HostsLauncher().plan(order_of(build_config, tmp_path / "run", **cluster))


QUICKSTART = ROOT / "configs" / "quickstart.toml"


TEACHER = (
    '{name="NAME", kind="openai", base_url="http://x/v1", model="m", api_key_env="KEY_NAME",'
    "prompt_usd_per_million=1, completion_usd_per_million=1}"
)


PAID = (
    f"replay.teachers=[{TEACHER.replace('NAME', 'X')}, {TEACHER.replace('NAME', 'Y')}]",
    "replay.budget.usd=1",
    "replay.ask=2",
)


ROSTER = Path("/run/hosts")


def test_a_worker_inherits_no_key_from_where_it_is_launched() -> None:
    words = worker_command("python", load_config(QUICKSTART, PAID), ROSTER, None)
    assert words[:5] == ["env", "-u", "KEY_X", "-u", "KEY_Y"]
    assert words[5:10] == ["python", "-P", "-m", "composer_mesh", "worker"]


def test_a_worker_of_a_run_without_keys_is_started_directly() -> None:
    words = worker_command("python", load_config(QUICKSTART), ROSTER, None)
    assert words[:5] == ["python", "-P", "-m", "composer_mesh", "worker"]
