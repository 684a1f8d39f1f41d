"""A run on puzzles, function calls and a served task at once, whose server is killed on the way."""

from __future__ import annotations

import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "procs" / "helpers"))

from commands import Process, started
from live_run import RUN_DEADLINE_S, launched, wait_until

pytestmark = pytest.mark.timeout(1800)

LEARNED_S = 900.0
"""Of the warm start on conversations of thousands of tokens, and of the run itself."""

SOURCES = '''
"""The three sources, each with an expert: a warm start and builtin teachers need one."""

from composer_mesh.plugins.openenv.client.task import OpenEnvTask
from composer_mesh.plugins.task_packages.bfcl.task import BfclMultiTurn
from composer_mesh.plugins.task_packages.reasoning_gym import ReasoningGym
from composer_mesh.tasks.task import TaskSettings
from composer_mesh.tasks.toolbox import ToolboxTask


def first_of(messages):
    return next(one["content"] for one in messages if one["role"] == "user")


class Puzzles(ReasoningGym):
    """Words to spell backward."""

    def expert(self, messages):
        text = first_of(messages)
        if "backward" not in text:
            raise ValueError("no word to spell backward")
        word = text.partition("): ")[2].split()[0]
        return f"<answer>{word[::-1]}</answer>"

    def corrupted(self, messages, rng):
        right = self.expert(messages)
        return rng.choice([right.removesuffix("</answer>"), "<answer>?</answer>"])


class Functions(BfclMultiTurn):
    """Gold calls in their order, known by the first request."""

    name = "functions"

    def load(self):
        super().load()
        rows = [*self.rows("train"), *self.rows("heldout")]
        self.by_request = {self.prompt(row): row for row in rows}

    def expert(self, messages):
        first = first_of(messages)
        for request, row in self.by_request.items():
            if first.endswith(request):
                said = sum(one["role"] == "assistant" for one in messages)
                gold = self.gold(row)
                return gold[min(said, len(gold) - 1)]
        raise ValueError("no request of this package")

    def corrupted(self, messages, rng):
        return self.expert(messages)[: rng.randrange(1, 20)]


class Served(OpenEnvTask):
    """The toolbox, played on a server."""

    name = "served"
    native = ToolboxTask.create(TaskSettings())

    def expert(self, messages):
        return self.native.expert(messages)

    def corrupted(self, messages, rng):
        return self.native.corrupted(messages, rng)
'''


@contextmanager
def serving(folder: Path, port: int = 0) -> Iterator[tuple[Process, str]]:
    """`serve-env toolbox` and its URL."""
    folder.mkdir()
    words = (
        "serve-env",
        "toolbox",
        "--port",
        str(port),
        "--set",
        "environment.tool_error_penalty=0",
    )
    out, err = folder / "out", folder / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        server = started(words, stdout, stderr, folder)
    try:
        wait_until(lambda: url_in(out.read_text()), "a server", RUN_DEADLINE_S)
        yield server, url_in(out.read_text())
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(RUN_DEADLINE_S)


def url_in(text: str) -> str:
    found = re.search(r"http://\S+:\d+", text)
    return found[0] if found else ""


def test_a_run_on_three_sources_loses_nothing_when_a_server_is_killed(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "sources.py").write_text(SOURCES)
    with serving(tmp_path / "first") as (server, url):
        mixture = ", ".join(
            (
                '{task="sources.py:Puzzles", options={name="spell_backward"}, weight=2.0}',
                '{task="sources.py:Functions", options={train=["miss_func", "miss_param"]}}',
                f'{{task="sources.py:Served", options={{url="{url}"}}, weight=5.0}}',
            )
        )
        settings = {
            "data": f"{{mixture=[{mixture}]}}",
            "run.steps": 8,
            "environment.max_turns": 24,
            "environment.call_s": 60.0,
            "policy.vocab_size": 2048,
            "policy.hidden_size": 96,
            "policy.max_context": 8192,
            "policy.warm_start.steps": 400,
            "policy.warm_start.demonstrations": 1600,
            "policy.warm_start.batch_size": 4,
            "trainer.microbatch_tokens": 16384,
            "schedule.prompts_per_step": 8,
            "schedule.group_size": 4,
            "supervision.rollout_retries": 1000,
            "eval.episodes": 12,
        }
        with launched(tmp_path / "run", tmp_path / "cache", settings, tmp_path / "work") as run:
            wait_until(
                lambda: len(run.lines("metrics.jsonl")) >= 2 or run.process.poll() is not None,
                "second step",
                LEARNED_S,
            )
            server.kill()
            server.wait(RUN_DEADLINE_S)
            run.until(lambda run: run.events("rollout_retried"), "retried rollout")
            with serving(tmp_path / "second", int(url.rpartition(":")[2])):
                status = run.wait(LEARNED_S)
    assert status == 0, run.stderr
    steps = run.objects("metrics.jsonl")
    assert len(steps) == 8
    assert {"reasoning_gym.spell_backward", "functions", "served"} == {
        key.removeprefix("reward/success/")
        for step in steps
        for key in step
        if key.startswith("reward/success/")
    }
    channels = run.summary()["channels"]
    assert all(channels[name]["active_steps"] for name in ("policy", "sdpo", "replay"))
    assert not run.events("rollout_given_up")
    played = Counter(trace.task for trace in run.traces() if trace.split == "train")
    groups = {name: count // 4 for name, count in played.items()}
    assert groups == {"reasoning_gym.spell_backward": 16, "functions": 8, "served": 40}
    assert any(step["reward/success/served"] > 0 for step in steps)
