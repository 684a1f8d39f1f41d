"""`launch`: what is refused, what a dry run shows, what is kept of a launch, and its end."""

from __future__ import annotations

import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

from composer_mesh.configs.load import load_config
from composer_mesh.configs.paths import with_whole_paths
from composer_mesh.mesh.processes import is_alive
from composer_mesh.services.cli import main
from composer_mesh.services.commands.parser import make_parser
from composer_mesh.services.directory.claim import claimed, holder
from composer_mesh.services.directory.status import RunStatus, RunUnavailable, write_status
from composer_mesh.services.launch.by_ssh import HostsLauncher, pid_of
from composer_mesh.services.launch.handle import follow, hints, read_handle, write_handle
from composer_mesh.services.launch.ports import Handle, Order, Plan, State
from composer_mesh.services.launch.workers import renamed_log, write_files

QUICKSTART = ROOT / "configs" / "quickstart.toml"
HOSTS = ["cluster.kind=hosts", "cluster.lease_s=9"]


def launch(*more: str, sets: list[str] | None = None) -> int:
    overrides = [word for one in sets or [] for word in ("--set", one)]
    return main(["launch", str(QUICKSTART), *overrides, *more])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user stands."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def long_lived(tmp_path: Path) -> Iterator[Handle]:
    """A handle of something that goes on, and prints two lines."""
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho one\necho two\nexec sleep 600\n")
    script.chmod(0o755)
    (tmp_path / "run" / "launch").mkdir(parents=True)
    config = load_config(QUICKSTART)
    order = Order(config, (), tmp_path / "run", tmp_path, str(script))
    handle = HostsLauncher().submit(order, HostsLauncher().plan(order))
    yield handle
    HostsLauncher().stop(handle, 5.0)
    assert HostsLauncher().state(handle)[0] == "ended"


def test_a_dry_run_shows_file_and_command_and_changes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch("--dry-run", sets=["run.steps=5"]) == 0
    out = capsys.readouterr().out
    run = folder / "runs" / "quickstart"
    assert f"# file {run}/launch/config.toml" in out
    command = shlex.join(
        [sys.executable, "-P", "-m", "composer_mesh", "train", f"{run}/launch/config.toml"]
    )
    assert f"{command} --output {run}\n" in out
    assert list(folder.iterdir()) == []


def test_a_dry_run_names_everything_of_a_run_on_hosts_but_no_secret(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = 'cluster.workers=["tls://127.0.0.1:22301", "tls://192.0.2.6:22302"]'
    assert launch("--dry-run", "--output", "r", sets=[*HOSTS, workers]) == 0
    out = capsys.readouterr().out
    assert "worker --listen tls://127.0.0.1:22301 --name host-0" in out
    assert "--with-process CONTROLLER\n# CONTROLLER is the process id of train" in out
    assert "# worker host-1 must be running already: " in out
    assert f"authority of the run: {folder}/r/.tls (secret, not shown)" in out
    assert list(folder.iterdir()) == []


def test_a_dry_run_says_where_each_process_is_and_what_it_gets(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = 'cluster.workers=["tls://192.0.2.5:22302", "tls://192.0.2.6:22302"]'
    hosts = (
        'placement.hosts=[{name = "node", count = 2, cores = 8, memory_gb = 64, gpus = 2, '
        "gpu_memory_gb = 79}]"
    )
    ranks = ["trainer.ranks=3", "placement.trainer.gpus=1", "placement.generator.gpus=1"]
    assert launch("--dry-run", "--output", "r", sets=[*HOSTS, workers, hosts, *ranks]) == 0
    out = capsys.readouterr().out
    masks = re.findall(r"#   (\S+) (trainer-\d) rank (\d): .* CUDA_VISIBLE_DEVICES=(\S+)", out)
    assert masks == [
        ("node-0", "trainer-0", "0", "0"),
        ("node-0", "trainer-1", "1", "1"),
        ("node-1", "trainer-2", "2", "0"),
    ]
    assert "MONARCH_RDMA_MAX_CHUNK_SIZE_MB=8" in out
    assert "ranks 0 to 2 meet at a free TCP port of rank 0 on the cluster address of node-0" in out
    assert "# weights: trainer -> generator, sdpo_teacher: RDMA buffers" in out


def test_secret_files_are_not_shown_and_are_their_owners_alone(folder: Path) -> None:
    secret, plain = folder / "s" / "key", folder / "s" / "plain"
    write_files(Plan({secret: "k", plain: "p"}, secret=frozenset({secret})))
    assert secret.stat().st_mode & 0o777 == 0o600
    assert (secret.read_text(), plain.read_text()) == ("k", "p")


def test_the_config_of_a_launch_is_the_same_run_with_whole_paths(folder: Path) -> None:
    config = load_config(QUICKSTART, ["replay.cache=answers.sqlite"])
    whole = with_whole_paths(config, Path("/shared"))
    assert whole.policy.cache_dir == Path("/shared/.cache/composer-mesh")
    assert whole.replay.cache == Path("/shared/answers.sqlite")
    assert with_whole_paths(whole, Path("/elsewhere")) == whole
    before, after = config.model_dump(), whole.model_dump()
    before["policy"].pop("cache_dir"), after["policy"].pop("cache_dir")
    before["replay"].pop("cache"), after["replay"].pop("cache")
    assert before == after


@pytest.mark.parametrize(
    ("sets", "more", "words"),
    [
        (["sdpo.alpha=-1"], [], "sdpo.alpha"),
        (["cluster.kind=hosts"], [], "workers is empty"),
        ([], ["--resume"], "holds no run"),
        ([], ["--output", "used"], "already holds a run"),
    ],
)
def test_what_cannot_be_launched_is_refused_before_anything_is_written(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    sets: list[str],
    more: list[str],
    words: str,
) -> None:
    (folder / "used").mkdir()
    (folder / "used" / "metrics.jsonl").touch()
    assert launch(*more, sets=sets) == 2
    assert words in capsys.readouterr().err
    assert [path.name for path in folder.rglob("*")] == ["used", "metrics.jsonl"]


def test_a_run_that_goes_on_is_not_launched_again(
    long_lived: Handle, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_handle(folder / "run", long_lived)
    for more in ([], ["--resume"], ["--dry-run"]):
        assert launch("--output", "run", *more) == 2
        assert "has a run that is running" in capsys.readouterr().err
    kept = sorted(path.name for path in (folder / "run").iterdir())
    assert kept == [".launch.json.signature", "launch", "launch.json"]


def test_a_directory_that_is_written_by_a_train_is_not_launched_into(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with claimed(folder / "run"):
        assert holder(folder / "run") == os.getpid()
        assert launch("--output", "run") == 2
    assert "is being written by a running train" in capsys.readouterr().err
    assert holder(folder / "run") is None
    assert not (folder / "run" / "launch").exists()


def test_a_handle_is_read_as_it_was_written(folder: Path, long_lived: Handle) -> None:
    far = Handle("slurm", folder, "17", "python", folder, setup=("module load a b",))
    for handle in (far, long_lived):
        write_handle(folder, handle)
        assert read_handle(folder) == handle
    assert read_handle(folder / "nothing") is None
    (folder / "launch.json").write_text("{")
    with pytest.raises(RunUnavailable, match="restore it from a copy"):
        read_handle(folder)


def test_what_is_told_about_a_launch_can_be_typed(long_lived: Handle) -> None:
    told = hints(Path("runs/a b"), long_lived, telemetry=True)
    typed = [shlex.split(line, comments=True) for line in told]
    for words in typed:
        if words[0] == "composer-mesh":
            make_parser().parse_args(words[1:])
    assert {words[1] for words in typed} >= {"tree", "events", "scale", "stop", "launch"}
    assert typed[-1] == ["tail", "-F", str(long_lived.log)]


def test_a_local_run_is_in_a_session_of_its_own(long_lived: Handle) -> None:
    pid = pid_of(long_lived.job)
    assert is_alive(pid)
    assert os.getsid(pid) == pid != os.getsid(0)
    other = Handle("local", Path(), f"{pid}@1", "python", Path())
    assert HostsLauncher().state(other)[0] == "ended"  # another process of that id


def test_logs_of_earlier_starts_are_kept(folder: Path) -> None:
    log = folder / "controller.log"
    for number in range(3):
        renamed_log(log)
        log.write_text(str(number))
    kept = [(folder / name).read_text() for name in ("controller.1.log", "controller.2.log")]
    assert (kept, log.read_text()) == (["0", "1"], "2")


class Told:
    """A launcher whose run prints some lines and has ended then."""

    def __init__(self, lines: list[str], word: str, interrupt: bool = False) -> None:
        self.lines, self.word, self.interrupt = lines, word, interrupt

    def plan(self, order: Order) -> Plan:
        return Plan()

    def submit(self, order: Order, plan: Plan) -> Handle:
        raise NotImplementedError

    def state(self, handle: Handle) -> tuple[State, str]:
        return "ended", self.word

    def follow(self, handle: Handle) -> Iterator[str]:
        yield from self.lines
        if self.interrupt:
            raise KeyboardInterrupt

    def stop(self, handle: Handle, grace_s: float) -> None:
        raise AssertionError


def status_of(state: str) -> RunStatus:
    return RunStatus(1, None, state, 3, 5, 3, "none")


@pytest.mark.parametrize(
    ("state", "word", "code"),
    [
        ("finished", "?", 0),
        ("stopped", "?", 143),
        ("failed", "?", 1),
        ("running", "COMPLETED", 1),  # killed
        (None, "COMPLETED 0:0", 0),
        (None, "FAILED 1:0", 1),
    ],
)
def test_the_exit_status_is_the_runs(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    state: str | None,
    word: str,
    code: int,
) -> None:
    handle = Handle("slurm", folder, "17", "python", folder)
    write_handle(folder, handle)
    if state:
        write_status(folder, status_of(state))
    assert follow(Told(["one", "two"], word), handle, folder) == code
    assert capsys.readouterr().out == "one\ntwo\n"


def test_the_status_of_an_earlier_start_is_none(folder: Path) -> None:
    handle = Handle("slurm", folder, "17", "python", folder)
    write_status(folder, status_of("finished"))
    os.utime(folder / "status.json", (1, 1))
    write_handle(folder, handle)
    assert follow(Told([], "FAILED"), handle, folder) == 1


def test_ctrl_c_ends_the_following_and_not_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = Handle("slurm", folder, "17", "python", folder)
    assert follow(Told(["one"], "", interrupt=True), handle, folder) == 130
    assert f"the run continues: end it with composer-mesh stop {folder}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--listen", "tls://0.0.0.0:1"], "0.0.0.0"),
        (["--listen", "tls://127.0.0.1:0"], "--authority is not given"),
        (["--listen", "http://x"], "is not an address"),
    ],
)
def test_a_worker_that_would_be_open_to_others_is_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["worker", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_words_of_a_plan_are_words_of_the_worker(build_config: Any, folder: Path) -> None:
    from composer_mesh.services.launch.workers import workers_of

    cluster = {"kind": "hosts", "workers": ["tls://127.0.0.1:5"], "subnets": ["10.0.0.0/8"]}
    order = Order(build_config(cluster=cluster), (), folder, folder, "python")
    (one,) = workers_of(order)
    words = [word.replace("CONTROLLER", "12") for word in one.command(order)[4:]]
    typed = make_parser().parse_args(words)
    assert (typed.listen, typed.with_process, typed.subnet) == (one.address, 12, ["10.0.0.0/8"])
    assert (typed.roster, typed.authority) == (folder / "hosts", folder / ".tls")


def test_a_finished_run_has_nothing_to_resume(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tomllib.loads(QUICKSTART.read_text())
    steps = text["run"]["steps"]
    run = folder / "run"
    run.mkdir()
    (run / "config.toml").write_text(QUICKSTART.read_text())
    (run / "evaluations.jsonl").write_text(f'{{"step": {steps}, "success": 1.0, "episodes": 2}}\n')
    (run / "metrics.jsonl").touch()
    for command in (["launch", "--resume"], ["train", "--auto-resume"]):
        assert main([command[0], str(QUICKSTART), "--output", "run", command[1]]) == 0
        assert capsys.readouterr().out.startswith("nothing to do: ")
    assert main(["train", str(QUICKSTART), "--output", "run", "--resume"]) == 2
