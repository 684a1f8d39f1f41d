"""Environments that OpenEnv's own package serves, in its own Python: `nox -s openenv`.

COMPOSER_MESH_OPENENV_ENVS names the folder `envs` of a checkout of OpenEnv, for the environments
that ship there and not in the package.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

ROOT = Path(__file__).resolve().parents[4]
sys.path.append(str(ROOT / "tests" / "unit" / "helpers"))

from openenv_server import OpenEnvServer  # noqa: E402

from composer_mesh.plugins.openenv.client.errors import ServerFull  # noqa: E402
from composer_mesh.plugins.openenv.client.task import OpenEnvTask  # noqa: E402
from composer_mesh.rollouts.tool_calls import call_text  # noqa: E402
from composer_mesh.tasks.playing import SyncSession  # noqa: E402
from composer_mesh.tasks.task import TaskSettings  # noqa: E402

PYTHON = "COMPOSER_MESH_OPENENV_PYTHON"
ENVS = "COMPOSER_MESH_OPENENV_ENVS"
START_S = 120.0

COUNTER = '''
from fastmcp import FastMCP
from openenv.core.env_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State


class Counter(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp = FastMCP("counter")
        self.value, self.goal = 0, 1

        @mcp.tool
        def add(number: int) -> str:
            """Adds a number."""
            if self.value + number < 0:
                raise ValueError("the counter cannot go below zero")
            self.value += number
            return f"the counter is {self.value}"

        @mcp.tool
        def finish() -> str:
            """Ends."""
            return "the end"

        super().__init__(mcp)
        self._state = State(episode_id=None, step_count=0)

    def list_splits(self):
        return ["train", "test"]

    def num_tasks(self, split):
        return {"train": 3, "test": 2}[split]

    def reset(self, seed=None, episode_id=None, split="train", index=0, **kwargs):
        self.value, self.goal = 0, index + 1
        self._state = State(episode_id=episode_id, step_count=0)
        return Observation(metadata={})

    async def step_async(self, action, timeout_s=None, **kwargs):
        seen = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if not isinstance(action, CallToolAction):
            return seen
        self._state.step_count += 1
        seen.done = action.tool_name == "finish"
        seen.reward = float(self.value == self.goal) if seen.done else 0.0
        return seen

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation()

    @property
    def state(self):
        return self._state


app = create_app(
    Counter, CallToolAction, CallToolObservation, env_name="counter", max_concurrent_envs=2
)
'''

ECHO_TASK = """
from composer_mesh.plugins.openenv.client.task import OpenEnvTask


class Echo(OpenEnvTask):
    def expert(self, messages):
        return "words"

    def corrupted(self, messages, rng):
        return "w"
"""


@pytest.fixture(scope="session")
def python() -> Path:
    """The Python that has the real package."""
    found = Path(os.environ.get(PYTHON, ROOT / ".nox/openenv/bin/python")).absolute()
    if not found.exists():
        pytest.skip(f"{found} is not there: run `nox -s openenv`, or name a Python by {PYTHON}")
    return found


@contextmanager
def served(python: Path, folder: Path, module: str) -> Iterator[str]:
    """The URL of an app while it is served."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [str(python), "-m", "uvicorn", module, "--port", str(port), "--log-level", "error"]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        _await(url, process, folder / "server.log")
        yield url
    finally:
        process.kill()
        process.wait()


def _await(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5)
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
        else:
            return
    raise AssertionError(f"no server after {START_S:g} s: {log.read_text()}")


@pytest.fixture(scope="session")
def echo(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The package's own echo environment, as `openenv init` writes it, with eight sessions."""
    folder = tmp_path_factory.mktemp("echo")
    init = [str(python.parent / "openenv"), "init", "echo"]
    done = subprocess.run(init, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    app = folder / "echo" / "server" / "app.py"
    text = app.read_text()
    assert "max_concurrent_envs=1," in text
    app.write_text(text.replace("max_concurrent_envs=1,", "max_concurrent_envs=8,"))
    with served(python, folder / "echo", "server.app:app") as url:
        yield url


@pytest.fixture(scope="session")
def counter(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An environment with tools and a Task API on the package's base class."""
    folder = tmp_path_factory.mktemp("counter")
    (folder / "counter.py").write_text(COUNTER)
    with served(python, folder, "counter:app") as url:
        yield url


def made(url: str, **options: Any) -> OpenEnvTask:
    return OpenEnvTask.create(TaskSettings(max_turns=20, call_s=30.0), url=url, **options)


def test_the_packages_own_echo_is_played_by_texts(echo: str):
    task = made(echo, action="text", reward="summed", observation="echoed_message")
    assert task.rows("train") is None
    with SyncSession(task, task.episode("train", 0)) as session:
        assert session.messages[0]["content"] == "Echo environment ready!"
        assert session.step("hello").messages[0]["content"] == "hello"
        assert session.outcome().reward == pytest.approx(0.5)
    assert "the server tells none" in task.remarks()[2]


def test_tools_splits_and_terminal_rewards_of_the_real_package(counter: str):
    task = made(counter)
    assert [one["function"]["name"] for one in task.tools] == ["add", "finish"]
    assert task.episode("train", 1).payload == {"split": "train", "index": 1}
    assert task.episode("heldout", 0).payload == {"split": "test", "index": 0}
    with SyncSession(task, task.episode("train", 1)) as session:
        wrong = session.step(call_text("add", {"number": -5}))
        assert wrong.error is not None
        assert "below zero" in wrong.messages[0]["content"]
        assert session.step(call_text("add", {"number": "x"})).error.error_kind == "wrong_type"
        assert session.step(call_text("add", {"number": 2})).messages[0]["content"] == (
            "the counter is 2"
        )
        assert session.step(call_text("finish", {})).done
        assert session.outcome().reward == 1.0


def test_a_full_server_of_the_real_package_is_named(counter: str):
    task = made(counter, reset_s=27.5)
    episode = task.episode("train", 0)
    with (
        SyncSession(task, episode),
        SyncSession(task, episode),
        pytest.raises(ServerFull, match="of 2 "),
    ):
        SyncSession(task, episode)


FRAMES: list[dict[str, Any]] = [
    {"type": "reset", "data": {"seed": 1, "episode_id": "e"}},
    {"type": "state"},
    {"type": "step", "data": {"type": "list_tools"}},
    {"type": "step", "data": {"type": "call_tool", "tool_name": "add", "arguments": {"number": 1}}},
    {"type": "state", "data": {"turn": 0}},
    {"type": "step", "data": {"type": "call_tool", "tool_name": "finish", "arguments": {}}},
]


def test_the_server_of_the_unit_tests_speaks_as_the_real_one(counter: str):
    """Each answer of the small server has the fields that the real one's has, of the same types."""
    with OpenEnvServer() as small:
        for mine, real in zip(answers(small.url), answers(counter), strict=True):
            assert_alike(mine, real, json.dumps([mine, real]))


def answers(url: str) -> list[Any]:
    with connect(f"ws{url.removeprefix('http')}/ws", compression=None) as connection:
        found = []
        for frame in FRAMES:
            connection.send(json.dumps(frame))
            found.append(json.loads(connection.recv(60)))
    return found


def assert_alike(mine: Any, real: Any, whole: str) -> None:
    if isinstance(mine, dict):
        assert isinstance(real, dict), whole
        for key in mine.keys() & real.keys():
            assert_alike(mine[key], real[key], whole)
        if "type" in mine:
            assert mine["type"] == real["type"], whole
        if "data" in mine:
            assert mine["data"].keys() - {"metadata"} <= real["data"].keys(), whole
    elif mine is not None and real is not None:
        assert isinstance(real, float | int if isinstance(mine, float | int) else type(mine)), whole


def test_a_run_trains_on_the_packages_own_echo(echo: str, tmp_path: Path):
    (tmp_path / "echo_task.py").write_text(ECHO_TASK)
    options = f'{{url="{echo}", action="text", reward="summed", success_at=0.5}}'
    rewards = trained(tmp_path, ["data.task=echo_task.py:Echo", f"data.options={options}"])
    assert len(rewards) == 8
    assert all(0.0 <= reward <= 6.0 for reward in rewards)


GRID_TASK = """
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.plugins.openenv.client.task import OpenEnvTask


class Grid(OpenEnvTask):
    def expert(self, messages):
        down = '"x": 4' not in messages[-1]["content"]
        return call_text("act", {"action": "DOWN" if down else "RIGHT"})

    def corrupted(self, messages, rng):
        return call_text("act", {"action": "UP"})
"""


def test_a_run_trains_on_a_shipped_environment(python: Path, tmp_path: Path):
    if ENVS not in os.environ:
        pytest.skip(f"{ENVS} does not name the folder envs of a checkout of OpenEnv")
    (tmp_path / "grid_task.py").write_text(GRID_TASK)
    folder = Path(os.environ[ENVS])
    server = tmp_path / "server.py"
    server.write_text(
        f"import sys\nsys.path.insert(0, {str(folder)!r})\n"
        "from grid_world_env.server import app as shipped\n"
        "from openenv.core.env_server import create_app\n"
        "shipped.GridWorldEnvironment.SUPPORTS_CONCURRENT_SESSIONS = True\n"
        "app = create_app(shipped.GridWorldEnvironment, shipped.GridWorldAction, "
        'shipped.GridWorldObservation, env_name="grid", max_concurrent_envs=32)\n'
    )
    with served(python, tmp_path, "server:app") as url:
        task = made(url)
        with SyncSession(task, task.episode("train", 0)) as session:
            for move in ["DOWN"] * 4 + ["RIGHT"] * 4:
                done = session.step(call_text("act", {"action": move})).done
            assert done
            assert session.outcome().reward == 1.0
        settings = ["data.task=grid_task.py:Grid", f'data.options={{url="{url}"}}']
        rewards = trained(tmp_path, [*settings, "environment.max_turns=20"])
    assert len(rewards) == 8
    assert set(rewards) <= {0.0, 1.0}


def trained(folder: Path, settings: list[str]) -> list[float]:
    """Train two steps in a folder; return the rewards of the stored rollouts."""
    values = [
        *("run.steps=2", "eval.episodes=2", "schedule.group_size=2", "sdpo.alpha=0"),
        *("schedule.prompts_per_step=2", "replay.beta=0", "policy.warm_start.steps=30"),
        *("policy.warm_start.hinted_share=0.0", f"policy.cache_dir={folder / 'cache'}"),
        *("policy.warm_start.demonstrations=20", *settings),
    ]
    command = [str(Path(sys.executable).parent / "composer-mesh"), "train"]
    command += [str(ROOT / "configs" / "quickstart.toml"), "--output", str(folder / "run")]
    command += [part for value in values for part in ("--set", value)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    from composer_mesh.services.store.reading import RunReader

    with RunReader(folder / "run") as reader:
        return [trace.reward for trace in reader.all_traces() if trace.split == "train"]
