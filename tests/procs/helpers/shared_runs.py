"""The shared runs: a dozen whole runs of the shortened quickstart, whose files many tests read.

    asynchronous       rollouts one version ahead, all channels, a tracker that never returns
    synchronous        all channels, left alone
    trainer_killed     the synchronous one with a killed trainer and a damaged checkpoint
    colocated          the synchronous one, whose processes take turns on their devices
    colocated_killed   that one with a trainer and a generator killed as the turn changes
    controller_killed  the synchronous one, stopped, killed with all its processes, and resumed
    interrupted        looked at by `tree`, given a late reward, ended by Ctrl-C
    unsupervised       a generator is killed, and restarts are off
    replicas_killed    generators, environments and rollout workers are killed or stopped
    teacher_killed     the SDPO teacher is killed, and steps continue without its channel
    replay_lost        a replica of the teacher replay is killed
    late_replay        late pairs, behind a gate
    paid_replay        paid teachers with every fault of a provider, under a ceiling
    policy_alone       one channel, from the checkpoint of another run, over-provisioned groups
    carried            one group waits at a gate over many steps, and the run is killed meanwhile
    own_functions      the user's own loss, advantage and backend
    two_hosts          two hosts, of which one is lost and replaced, until the controller is killed

Each is a function that makes it and returns what was seen. What a run must be is said by tests.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fault_proxy import FaultProxy, Model
from live_run import (
    END_DEADLINE_S,
    ENDLESS,
    GONE_DEADLINE_S,
    SHORT,
    LiveRun,
    composer_mesh,
    launched,
    tree_of,
    wait_until,
)
from own_functions import OWN_FUNCTIONS, PLANTED, custom
from side_by_side import SideBySide

from composer_mesh.actors.checkpoints.folder import checkpoints_of
from composer_mesh.actors.experts.http import TOKEN_ENV
from composer_mesh.services.directory.status import read_status
from composer_mesh.services.steps.step_manifest import manifest_from_json
from composer_mesh.services.store.reading import RunReader

Settings = dict[str, Any]


@dataclass
class Finished:
    """A run that has ended, and its exit status."""

    run: LiveRun
    status: int
    seen: dict[str, Any] = field(default_factory=dict)
    """What was seen while it ran, by name."""


@contextmanager
def own_temporary_folder() -> Iterator[Path]:
    """For the temporary files of a run; its path is short, as the run's sockets need it."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as path:
        yield Path(path)


def steps(run: LiveRun) -> int:
    return len(run.lines("metrics.jsonl"))


def after_steps(run: LiveRun, count: int) -> None:
    run.until(lambda run: steps(run) >= count, f"step {count}")


def strike(run: LiveRun, actor: str, number: signal.Signals = signal.SIGKILL) -> int:
    """Send a signal to an actor's process, once it serves; returns its id."""
    pid = run.until(lambda run: run.pids().get(actor), f"process of {actor}")
    os.kill(pid, number)
    return pid


def kill_rank(run: LiveRun, actor: str) -> None:
    """Kill a rank of the trainer when its newest checkpoint lacks a step that was trained."""
    while True:
        pid = strike(run, actor, signal.SIGSTOP)  # no rank gets further without it
        trained, found = steps(run), checkpoints_of(run.root)
        if not found or found[-1].step < trained:
            os.kill(pid, signal.SIGKILL)
            return
        os.kill(pid, signal.SIGCONT)
        after_steps(run, trained + 1)


BLOCKED: Settings = {
    "tracking": '[{type = "custom", import_path = "blocking_tracker:BlockingTracker", '
    "queue = 1, finish_s = 0.2}]"
}


def asynchronous(runs: SideBySide, folder: Path) -> Finished:
    with launched(folder / "run", runs.cache, BLOCKED, as_installed=True) as run:
        return Finished(run, run.wait())


SYNCHRONOUS: Settings = {
    "run.steps": 6,
    "schedule.max_lag": 0,
    "eval.episodes": 2,
    "replay.actors": 1,
    "trainer.checkpoint_every": 2,
}


def synchronous(runs: SideBySide, folder: Path) -> Finished:
    with launched(folder / "run", runs.cache, SYNCHRONOUS) as run:
        return Finished(run, run.wait())


COLOCATED: Settings = {**SYNCHRONOUS, "placement.colocate": "true"}


def colocated(runs: SideBySide, folder: Path) -> Finished:
    with launched(folder / "run", runs.cache, COLOCATED) as run:
        return Finished(run, run.wait())


def colocated_killed(runs: SideBySide, folder: Path) -> Finished:
    """After steps 2 and 4 a checkpoint takes the device from the generators, and gives it back."""
    with launched(folder / "run", runs.cache, COLOCATED) as run:
        after_steps(run, 2)
        strike(run, "trainer")
        run.until(lambda run: run.events("trainer_restarted"), "restart of the trainer")
        after_steps(run, 4)
        strike(run, "generator-0")
        run.until(replaced("generator-0.2"), "replacement of the generator")
        return Finished(run, run.wait())


def flipped(checkpoint: Path) -> None:
    """Change a bit of a checkpoint's largest file."""
    file = max(checkpoint.rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    whole = bytearray(file.read_bytes())
    whole[len(whole) // 2] ^= 1
    file.write_bytes(whole)


def trainer_killed(runs: SideBySide, folder: Path) -> Finished:
    """The disk has damaged the newest checkpoint, so it begins again from what was before that."""
    with launched(folder / "run", runs.cache, SYNCHRONOUS) as run:
        run.until(lambda run: checkpoints_of(run.root), "the first checkpoint")
        after_steps(run, 3)
        trainer = strike(run, "trainer", signal.SIGSTOP)  # it writes no further one
        damaged = checkpoints_of(run.root)[-1]
        flipped(damaged.folder)
        os.kill(trainer, signal.SIGKILL)
        return Finished(run, run.wait(), {"damaged": damaged})


@dataclass
class Resumed:
    """One run in parts: stopped by SIGTERM, or killed with all its processes, and then resumed."""

    stopped: Finished
    run: LiveRun
    status: int


def controller_killed(runs: SideBySide, folder: Path) -> Resumed:
    """All three channels are on. The last part has another number of restarts."""
    root, options = folder / "run", ("--resume",)
    with launched(root, runs.cache, SYNCHRONOUS) as run:
        after_steps(run, 1)
        run.process.terminate()
        stopped = Finished(run, run.wait(END_DEADLINE_S))
        seen = {"stderr": run.stderr, "events": run.events("run_stopped")}
        seen |= {"steps": steps(run), "traces": run.traces(), "summary": run.summary()}
        stopped.seen = seen
    with launched(root, runs.cache, SYNCHRONOUS, options=options) as run:
        after_steps(run, 3)
        run.signal_group(signal.SIGKILL)
        run.process.wait()
        wait_until(lambda: not run.living(), "end of the last process", GONE_DEADLINE_S)
    changed = {**SYNCHRONOUS, "supervision.trainer_restarts": 4}
    with launched(root, runs.cache, changed, options=options, as_installed=True) as run:
        return Resumed(stopped, run, run.wait())


@dataclass(frozen=True)
class Watched:
    """A run that `tree` looked at while it trained, that got a late reward and Ctrl-C ended."""

    run: LiveRun
    as_json: subprocess.CompletedProcess[str]
    as_text: subprocess.CompletedProcess[str]
    newest: int
    posted: subprocess.CompletedProcess[str]
    refused: subprocess.CompletedProcess[str]
    status: int


def interrupted(runs: SideBySide, folder: Path) -> Watched:
    root = folder / "run"
    with launched(root, runs.cache, ENDLESS | {"late_rewards.max_age": 900}) as run:
        run.until_training()
        run.until(tells_of_a_step, "status of the first step")  # it is written every 2 s
        text, as_json = composer_mesh("tree", str(root)), tree_of(root)
        newest = run.objects("metrics.jsonl")[-1]["policy_version"]
        first = min(trace.trace_id for trace in run.traces())
        posted = composer_mesh("reward", str(root), first, "0.123", "--source", "a test")
        refused = composer_mesh("reward", str(root), "train-nobody", "1")
        run.until(steps_with_late_rewards, "late reward in a step")
        run.signal_group(signal.SIGINT)
        status = run.wait(END_DEADLINE_S)
    return Watched(run, as_json, text, newest, posted, refused, status)


def tells_of_a_step(run: LiveRun) -> bool:
    status = read_status(run.root)
    return status is not None and status.step >= 1


def steps_with_late_rewards(run: LiveRun) -> list[dict[str, Any]]:
    return [step for step in run.objects("metrics.jsonl") if step["late/rewards"]]


def unsupervised(runs: SideBySide, folder: Path) -> Finished:
    never = {"supervision.restarts": 0, "supervision.trainer_restarts": 0}
    with launched(folder / "run", runs.cache, ENDLESS | never) as run:
        run.until_training()
        strike(run, "generator-0")
        return Finished(run, run.wait(END_DEADLINE_S))


REPLICAS: Settings = {
    **SHORT,
    "run.steps": 30,
    "generator.replicas": 2,
    "environment.replicas": 2,
    "rollouts.workers": 2,
    "supervision.heartbeat_s": 0.5,
    "supervision.hang_s": 15.0,  # those that are not stopped have to answer in time
    "supervision.backoff_s": 0.1,
}
KILLED = ("generator-0", "environment-1", "rollouts-0")
HUNG = ("generator-1", "environment-0", "rollouts-1")


def replaced(actor: str) -> Callable[[LiveRun], bool]:
    """Whether an actor serves in the place of a dead one."""
    return lambda run: actor in {event["actor"] for event in run.events("actor_restarted")}


def replicas_killed(runs: SideBySide, folder: Path) -> Finished:
    with launched(folder / "run", runs.cache, REPLICAS) as run:
        run.until_training()
        struck = [strike(run, name, signal.SIGSTOP) for name in HUNG]
        struck += [strike(run, name) for name in KILLED]
        for name in (*KILLED, *HUNG):
            run.until(replaced(f"{name}.2"), f"replacement of {name}")
        return Finished(run, run.wait(), {"struck": struck})


def with_and_without(run: LiveRun) -> tuple[list[int], list[int]]:
    """The steps with error sites that had the SDPO channel, and those that had not."""
    found = [step for step in run.objects("metrics.jsonl") if step["sdpo/views"]]
    taught = [step["step"] for step in found if step["loss/sdpo"] is not None]
    return taught, [step["step"] for step in found if step["loss/sdpo"] is None]


def teacher_killed(runs: SideBySide, folder: Path) -> Finished:
    settings = {**ENDLESS, "replay.beta": 0, "sdpo.when_lost": "skip"}
    settings["supervision.backoff_s"] = 5.0  # long enough for a step without it
    with launched(folder / "run", runs.cache, settings) as run:
        run.until(lambda run: with_and_without(run)[0], "first step with the channel")
        strike(run, "sdpo_teacher")
        run.until(lambda run: run.events("actor_restarted"), "replacement of the teacher")
        there = steps(run)
        run.until(lambda run: with_and_without(run)[0][-1] > there + 1, "step with the channel")
        run.signal_group(signal.SIGINT)
        return Finished(run, run.wait(END_DEADLINE_S))


LATE: Settings = {"replay.delivery": "late"}


def replay_lost(runs: SideBySide, folder: Path) -> Finished:
    settings = {**ENDLESS, **LATE, "replay.actors": 2, "run.steps": 6}
    with launched(folder / "run", runs.cache, settings) as run:
        run.until_training()
        strike(run, "teacher_replay-0")
        return Finished(run, run.wait())


ONLY_WHAT_IS_NEW: Settings = {
    **{f"replay.gate.{sign}": 0 for sign in ("error", "entropy", "disagreement")},
    "replay.gate.min_value": 0.3,
}


def late_replay(runs: SideBySide, folder: Path) -> Finished:
    settings = {"run.steps": 4, **ONLY_WHAT_IS_NEW, **LATE}
    with launched(folder / "run", runs.cache, settings) as run:
        return Finished(run, run.wait())


KEY, KEY_ENV = "sk-or-v1-0123456789abcdef-the-key", "FAULT_PROXY_KEY"
CEILING_USD = 0.02


def teachers(base_url: str) -> str:
    one = (
        '{{name="{0}", kind="openai", model="{0}", base_url="{1}", api_key_env="{2}", '
        "prompt_usd_per_million=1.0, completion_usd_per_million=10.0, max_tokens=64}}"
    )
    return f"[{', '.join(one.format(name, base_url, KEY_ENV) for name in 'abc')}]"


def paid_replay(runs: SideBySide, folder: Path) -> Finished:
    """Through every fault that a provider knows; the proxy keeps a ledger of its own."""
    return asyncio.run(_paid_replay(runs.cache, folder))


async def _paid_replay(cache: Path, folder: Path) -> Finished:
    models = {name: Model(1_000, 10_000) for name in "abc"}
    async with FaultProxy(KEY, models, seed=5) as proxy:
        settings = {
            "replay.teachers": teachers(proxy.base_url),
            **LATE,
            "replay.budget.usd": CEILING_USD,
            "replay.timeout_s": 2.0,
            "replay.breaker.rest_s": 0.2,
        }
        with launched(folder / "run", cache, settings, variables={KEY_ENV: KEY}) as run:
            await asyncio.to_thread(run.until_training)
            started = [pid for pid in run.living() if pid != run.process.pid]
            knowing = [pid for pid in started if knows_a_secret(pid)]
            status = await asyncio.to_thread(run.wait)
        seen = {"started": started, "knowing": knowing, "charged": proxy.charged}
        return Finished(run, status, seen)


def knows_a_secret(pid: int) -> bool:
    """Whether a process has a key in its environment or its command."""
    try:
        texts = [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("environ", "cmdline")]
    except FileNotFoundError:  # it has ended
        return False
    told = b"".join(texts).decode(errors="replace")
    return any(word in told for word in (KEY_ENV, KEY, TOKEN_ENV))


def policy_alone(runs: SideBySide, folder: Path) -> Finished:
    """From a folder in Hugging Face format, which is the checkpoint of another run."""
    other = runs.result("asynchronous").run
    checkpoint = other.root / "checkpoints" / f"step-{SHORT['run.steps']}"
    settings = {"sdpo.alpha": 0, "replay.beta": 0, "policy.path": checkpoint}
    settings["schedule.overprovision"] = 2
    with launched(folder / "run", runs.cache, settings) as run:
        return Finished(run, run.wait(), {"checkpoint": checkpoint})


GATED = """
import asyncio

from composer_mesh import Workflow


class Gated(Workflow):
    def __init__(self, port, index):
        self.port, self.index = port, index

    async def run(self, episode, engine):
        async with engine.environment() as session:
            agent = engine.conversation(session.messages)
            text = await agent.act()
            if (episode.split, episode.index) == ("train", self.index):
                await self.opened()
            while not (step := await session.step(text)).done:
                agent.say(step.messages)
                text = await agent.act()
            outcome = await session.finish()
        return [agent.trajectory(outcome.reward, success=outcome.success)]

    async def opened(self):
        # The gate accepts no connection, and closes them all when it opens.
        try:
            reader, _ = await asyncio.open_connection("127.0.0.1", self.port)
            await reader.read()
        except OSError:
            pass
"""
HELD = 1
"""The group whose rollouts wait at the gate after their first turn; it plays the episode `HELD`."""
CARRIED: Settings = {
    "run.steps": 12,
    "schedule.carried_groups": 2,
    "schedule.max_token_age": 3,
    "schedule.group_size": 2,
    "replay.actors": 1,
    "eval.episodes": 2,
    "trainer.checkpoint_every": 2,
    "rollouts.workflow": "gated_workflow.py:Gated",
}


def carried(runs: SideBySide, folder: Path) -> Resumed:
    """Killed with all its processes after two steps; the gate opens five steps after that."""
    root, work = folder / "run", folder / "work"
    work.mkdir()
    (work / "gated_workflow.py").write_text(GATED)
    with socket.create_server(("127.0.0.1", 0), backlog=100) as gate:
        options = f"{{port = {gate.getsockname()[1]}, index = {HELD}}}"
        settings = {**CARRIED, "rollouts.options": options}
        with launched(root, runs.cache, settings, work) as run:
            after_steps(run, 2)
            run.signal_group(signal.SIGKILL)
            killed = Finished(run, run.process.wait())
            wait_until(lambda: not run.living(), "end of the last process", GONE_DEADLINE_S)
            killed.seen = {"steps": steps(run), "groups": taken_groups(root)}
        with launched(root, runs.cache, settings, work, options=("--resume",)) as run:
            after_steps(run, killed.seen["steps"] + 5)
            gate.close()
            return Resumed(killed, run, run.wait())


def taken_groups(root: Path) -> list[tuple[int, ...]]:
    """The groups of each step that is planned, step by step."""
    with RunReader(root) as reader:
        return [manifest_from_json(row.step, row.manifest).groups for row in reader.steps()]


def own_functions(runs: SideBySide, folder: Path) -> Finished:
    """In a working directory with modules that no process may import."""
    work = folder / "work"
    work.mkdir()
    (work / "users_of_a_run.py").write_text(OWN_FUNCTIONS)
    for name in PLANTED:
        (work / name).write_text("open(__file__ + '.ran', 'a').close()\n")
    settings: Settings = {
        "run.steps": 2,
        "sdpo.alpha": 0,
        "replay.beta": 0,
        "eval.episodes": 2,
        **custom("loss", "loss", "{scale = 0.25}"),
        "loss.needs": '["entropies"]',
        "trainer.backend.import_path": "users_of_a_run:Backend",
        **custom("advantage", "advantage", "{value = 0.5}"),
    }
    with own_temporary_folder() as temporary:
        variables = {"TMPDIR": str(temporary)}
        with launched(folder / "run", runs.cache, settings, work, variables=variables) as run:
            status = run.wait()
        ran = [path.name for path in work.glob("*.ran")]
        seen = {"ran": ran, "left": list(temporary.iterdir())}
    return Finished(run, status, seen)
