"""An offline job makes the pairs of a run, so many states at once, and loses no paid answer.

The command as a user runs it: light, interrupted, gone on with.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from offline_runs import BUILTIN, ENVIRON, paid, replay_section, rows_of, traces_of, write_run
from preferences import ADD, answer, failure
from pytest_httpserver import HTTPServer
from repetition import LONG
from scripted_provider import KEY
from werkzeug import Request, Response

from composer_mesh.actors.experts.http import Expert, ExpertPanel
from composer_mesh.rollouts.pair_filters import PairFilters
from composer_mesh.rollouts.pairs import FailureKind, FrozenState, TeacherAnswer, TeacherReply
from composer_mesh.rollouts.tool_calls import assistant_message
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.cli import main
from composer_mesh.services.offline.job import OfflineJob, selections, share_of
from composer_mesh.services.offline.session import Stopped, TeacherClient, is_short
from composer_mesh.services.offline.traces import TraceFileError
from composer_mesh.services.replay.teacher_queries import Replay
from composer_mesh.tasks.toolbox import ToolboxTask


class Experts:
    """The builtin teachers without HTTP; each reply waits some turns of the loop, by `seed`."""

    def __init__(self, task: ToolboxTask, seed: int = 0) -> None:
        known = [Expert(of["name"], of.get("error_rate", 0.0)) for of in BUILTIN]
        self._panel, self._rng = ExpertPanel(task, 3, known), random.Random(seed)
        self.asked: list[str] = []
        self.stop_after: tuple[int, TeacherClient] | None = None

    async def ask(self, state: FrozenState, n: int) -> list[TeacherReply]:
        self.asked.append(state.state_id)
        if self.stop_after is not None and len(self.asked) == self.stop_after[0]:
            self.stop_after[1].stop()
        for _ in range(self._rng.randrange(20)):
            await asyncio.sleep(0)
        return [self._answer(name, state) for name in self._panel.names[:n]]

    query = ask

    def stop_waiting(self) -> None:
        pass

    def _answer(self, name: str, state: FrozenState) -> TeacherReply:
        if name == "hasty" and state.seed % 7 == 0:
            return failure(name)
        text = self._panel.action(name, state.messages)
        return TeacherAnswer(name, text, assistant_message(text, "call"), 0.0, True, 0.1)


@pytest.fixture
def config(build_config) -> Any:
    return build_config(replay=replay_section(BUILTIN))


@pytest.fixture
def groups(toolbox: ToolboxTask) -> list[list[Trace]]:
    traces = traces_of(toolbox, 8)
    return [traces[at : at + 3] for at in range(0, len(traces), 3)]


def job_with(config: Any, experts: Experts, concurrency: int = 5) -> OfflineJob:
    return OfflineJob(config, TeacherClient(experts, concurrency), concurrency)


async def in_a_run(config: Any, groups: Sequence[Sequence[Trace]], experts: Experts) -> list[str]:
    """The pairs of a run that asks about one group after the other."""
    replay = Replay(experts, config.replay, config.schedule.prompts_per_step, config.run.seed)
    filters = PairFilters(config.replay.filters)
    return [
        pair.pair_id
        for group in groups
        for pair in filters.keep((await replay.ask_about(replay.choose(group))).pairs).kept
    ]


@pytest.mark.parametrize("states", ["value", "first"])
@pytest.mark.parametrize("seed", range(4))
async def test_the_pairs_are_those_of_the_run(
    build_config: Any, groups: list[list[Trace]], toolbox: ToolboxTask, seed: int, states: str
) -> None:
    config = build_config(replay=replay_section(BUILTIN, states=states))
    expected = await in_a_run(config, groups, Experts(toolbox, seed=99))
    job = job_with(config, Experts(toolbox, seed))
    assert await job.run(groups)
    assert [pair.pair_id for pair in job.pairs] == expected
    assert len(expected) > 5


async def test_a_limit_asks_about_the_first_states_only(
    config: Any, groups: list[list[Trace]], toolbox: ToolboxTask
) -> None:
    everything, first = Experts(toolbox), Experts(toolbox)
    await job_with(config, everything, 1).run(groups)
    assert await job_with(config, first, 1).run(groups, limit=7)
    assert first.asked == everything.asked[:7]


async def test_a_stopped_job_keeps_whole_groups_from_the_first_one(
    config: Any, groups: list[list[Trace]], toolbox: ToolboxTask
) -> None:
    whole = job_with(config, Experts(toolbox))
    await whole.run(groups)
    experts = Experts(toolbox)
    job = job_with(config, experts, 4)
    experts.stop_after = (9, job.teacher_client)
    assert not await job.run(groups)
    assert 0 < job.figures.groups < len(groups)
    assert job.pairs == whole.pairs[: len(job.pairs)]
    assert len(experts.asked) == 9


async def test_a_cancelled_job_leaves_no_question_under_way(
    config: Any, groups: list[list[Trace]]
) -> None:
    under_way: list[int] = []
    full = asyncio.Event()

    class Silent:
        async def ask(self, state: FrozenState, n: int) -> list[TeacherReply]:
            under_way.append(1)
            if len(under_way) == 4:
                full.set()
            try:
                await asyncio.Event().wait()
            finally:
                under_way.pop()
            return []

        def stop_waiting(self) -> None:
            pass

    job = OfflineJob(config, TeacherClient(Silent(), 4), 4)
    running = asyncio.create_task(job.run(groups))
    await full.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert under_way == []


async def test_figures_count_every_state_once_and_every_pair(
    config: Any, groups: list[list[Trace]], toolbox: ToolboxTask
) -> None:
    told = []
    job = OfflineJob(
        config, TeacherClient(Experts(toolbox), 5), 5, lambda of: told.append(of.groups)
    )
    await job.run(groups)
    figures = job.figures
    assert told == list(range(1, len(groups) + 1))
    assert figures.states == sum(figures.outcomes.values()) == 16
    assert figures.kept == len(job.pairs)
    assert figures.outcomes["pair"] == figures.kept + sum(figures.dropped.values())
    hasty = figures.teachers["hasty"]
    assert hasty.queried == hasty.answered + sum(hasty.failed.values()) == 16
    assert share_of(figures.teachers["careful"].majority) > 0.9
    assert hasty.failed["rate"] > 0


async def test_a_question_by_first_divergence_decides_all_siblings_and_is_counted_once(
    build_config: Any, groups: list[list[Trace]], toolbox: ToolboxTask
) -> None:
    config = build_config(replay=replay_section(BUILTIN, states="first"))
    experts = Experts(toolbox)
    job = job_with(config, experts)
    await job.run(groups)
    assert job.figures.states == len(experts.asked) == len(set(experts.asked))
    assert 8 <= job.figures.states <= 16
    assert job.figures.outcomes["pair"] == job.figures.kept + sum(job.figures.dropped.values())
    turns = Counter(pair.trace_id for pair in job.pairs)
    assert set(turns.values()) == {1}  # a rollout differs once


def test_traces_that_contradict_themselves_are_refused_with_their_group(
    config: Any, groups: list[list[Trace]]
) -> None:
    broken = groups[1][0]
    broken.messages[:] = broken.messages[:1]
    replay = Replay(None, config.replay, 2, 3)  # type: ignore[arg-type]
    with pytest.raises(TraceFileError, match="group 1 cannot be replayed"):
        list(selections(replay, groups))


def state(number: int) -> FrozenState:
    return FrozenState(f"s{number}", [{"role": "user", "content": str(number)}], number)


class Panel:
    """Answers once its gate is open; a teacher that it waits for is refused after a stop."""

    def __init__(self, refused: FailureKind | None = None) -> None:
        self.running = self.most = self.calls = 0
        self.gate, self._refused, self._stopped = asyncio.Event(), refused, asyncio.Event()
        self.gate.set()

    async def ask(self, state: FrozenState, n: int) -> list[TeacherReply]:
        self.calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
            if self._refused is not None and state.seed:
                await self._stopped.wait()
                return [answer("a", ADD), failure("b", self._refused)]
            return [answer(name, ADD) for name in "abc"[:n]]
        finally:
            self.running -= 1

    def stop_waiting(self) -> None:
        self._stopped.set()


async def test_no_more_states_are_asked_about_at_once_than_allowed() -> None:
    panel = Panel()
    client = TeacherClient(panel, 3)
    await asyncio.gather(*(client.query(state(i), 1) for i in range(20)))
    assert panel.most == 3


async def test_a_stopped_client_answers_what_is_under_way_and_asks_nothing_new() -> None:
    panel = Panel()
    panel.gate.clear()
    client = TeacherClient(panel, 2)
    tasks = [asyncio.create_task(client.query(state(i), 1)) for i in range(5)]
    await asyncio.sleep(0)
    client.stop()
    panel.gate.set()
    await client.idle()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(result, Stopped) for result in results] == [False, False, True, True, True]
    assert panel.calls == 2


@pytest.mark.parametrize("kind", [FailureKind.BUDGET, FailureKind.SUSPENDED])
async def test_a_state_that_waits_gives_up_after_the_answers_under_way(kind: FailureKind) -> None:
    panel = Panel(kind)
    panel.gate.clear()
    client = TeacherClient(panel, 2)
    under_way, waiting = (asyncio.create_task(client.query(state(i), 2)) for i in range(2))
    await asyncio.sleep(0)
    client.stop()
    assert (under_way.done(), waiting.done()) == (False, False)
    panel.gate.set()
    with pytest.raises(Stopped):
        await waiting
    assert len(under_way.result()) == 2


def test_a_state_is_short_of_budget_where_a_teacher_was_not_asked_for_it() -> None:
    assert is_short([answer("a", ADD), failure("b", FailureKind.BUDGET)])
    assert not is_short([answer("a", ADD), failure("b", FailureKind.RATE)])


DEADLINE_S = 60.0


class Provider:
    """Answers so many questions at once, and the others when its gate is opened."""

    def __init__(self, task: ToolboxTask, at_once: int) -> None:
        self._task, self._at_once = task, at_once
        self.gate, self.held = threading.Event(), threading.Semaphore(0)
        self._lock, self.questions = threading.Lock(), list[bytes]()

    def __call__(self, request: Request) -> Response:
        with self._lock:
            self.questions.append(request.data)
            place = len(self.questions)
        if place > self._at_once:
            self.held.release()
            assert self.gate.wait(DEADLINE_S)
        said = assistant_message(self._task.expert(request.get_json()["messages"]), "call")
        body = {"choices": [{"message": said}], "usage": {"cost": 0.0001}}
        return Response(json.dumps(body), content_type="application/json")

    def wait_until_held(self) -> None:
        assert self.held.acquire(timeout=DEADLINE_S), "no question was held back"


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    with HTTPServer(host="127.0.0.1", threaded=True) as server:
        yield server


@pytest.fixture
def provider(server: HTTPServer, toolbox: ToolboxTask) -> Iterator[Provider]:
    provider = Provider(toolbox, at_once=12)
    server.expect_request("/v1/chat/completions").respond_with_handler(provider)
    yield provider
    provider.gate.set()


@pytest.fixture
def command(
    tmp_path: Path, server: HTTPServer, build_config: Any, toolbox: ToolboxTask
) -> list[str]:
    teachers = [{**of, "base_url": server.url_for("/v1")} for of in paid("a", "b", "c")]
    config = build_config(replay=replay_section(teachers, 1.0))
    run = write_run(tmp_path / "run", config, traces_of(toolbox, 8))
    out = ["--output", str(tmp_path / "pairs.jsonl"), "--concurrency", "2"]
    return [sys.executable, "-m", "composer_mesh", "replay", str(run), *out]


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env={**os.environ, **ENVIRON},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_an_interrupted_replay_waits_for_what_is_paid_and_goes_on_where_it_was(
    command: list[str],
    provider: Provider,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    interrupted = start(command)
    provider.wait_until_held()
    interrupted.send_signal(signal.SIGINT)
    assert interrupted.stdout is not None
    lines = iter(interrupted.stdout.readline, "")
    assert any(line.startswith("stopping: waiting for the answers") for line in lines)
    provider.gate.set()
    rest, _ = interrupted.communicate(timeout=DEADLINE_S)
    assert interrupted.returncode == 130, rest
    assert "continue with the same command" in rest
    asked = len(provider.questions)
    assert asked < 48
    kept = rows_of(tmp_path / "pairs.jsonl")

    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    status = main(command[command.index("replay") :])
    said = "".join(capsys.readouterr())
    assert status == 0, said
    assert len(set(provider.questions)) == len(provider.questions) == 48
    rows = rows_of(tmp_path / "pairs.jsonl")
    assert [row["state_id"] for row in rows][: len(kept)] == [row["state_id"] for row in kept]
    assert len(rows) > len(kept) > 0
    assert KEY not in rest + said


@LONG
def test_a_second_signal_drops_what_is_under_way(command: list[str], provider: Provider) -> None:
    interrupted = start(command)
    provider.wait_until_held()
    interrupted.send_signal(signal.SIGTERM)
    assert interrupted.stdout is not None
    lines = iter(interrupted.stdout.readline, "")
    assert any(line.startswith("stopping: waiting for the answers") for line in lines)
    interrupted.send_signal(signal.SIGINT)
    interrupted.communicate(timeout=DEADLINE_S)
    assert interrupted.returncode == 143


def modules_after(*arguments: str) -> set[str]:
    """The top-level modules of a fresh interpreter that ran one command."""
    code = (
        "import sys, json; from composer_mesh.services.cli import main; "
        f"status = main({list(arguments)!r}); "
        "print(json.dumps([status, sorted({name.split('.')[0] for name in sys.modules})]))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    status, modules = json.loads(done.stdout.splitlines()[-1])
    assert status == 0, done.stderr
    return set(modules)


def test_a_replay_starts_no_mesh_and_loads_no_model(
    tmp_path: Path, build_config: Any, toolbox: ToolboxTask
) -> None:
    config = build_config(replay=replay_section(BUILTIN))
    run = write_run(tmp_path / "run", config, traces_of(toolbox, 1))
    loaded = modules_after("replay", str(run), "--output", str(tmp_path / "pairs.jsonl"))
    assert "httpx" in loaded
    assert not loaded & {"torch", "transformers"}
