"""Tasks of this project as TRL's `environment_factory`, in the trainer's own process.

    GRPOTrainer(..., environment_factory=TaskEnvironments(task))

Each tool of the task is a method of a generated class. The factory keeps what TRL's loop loses: the
error sites of calls. `ComposerGRPOTrainer` also tells the environment what the model says without a
call, such as its answer; with TRL's own trainer only calls are seen. For a task behind a URL see
`trl_environment`. Imports no TRL.
"""

from collections.abc import Mapping
from typing import Any

from composer_mesh.rollouts.tasks import Outcome
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.rollouts.traces import ErrorSite, Split
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.tool_methods import tool_method

ENDED = "The episode has ended."


class TaskEnvironment:
    """What all generated classes share; TRL calls what has no underscore."""

    _task: Task

    def __init__(self) -> None:
        self._session: SyncSession | None = None
        self._outcome: Outcome | None = None
        self._sites: list[ErrorSite] = []
        self._steps, self._done = 0, False

    def reset(self, **row: Any) -> str | None:
        """Begin the episode of a row's `split` and `index`; return its text for an empty prompt."""
        self._close()
        split: Split = row.get("split") or "train"
        self._session = SyncSession(self._task, self._task.episode(split, int(row["index"])))
        self._outcome, self._sites, self._steps, self._done = None, [], 0, False
        given = row.get("prompt") or [{"content": ""}]
        if any(message.get("content") for message in given):
            return None
        return "\n\n".join(str(one.get("content") or "") for one in self._session.messages)

    def get_reward(self) -> float | None:
        """Return the reward of the episode, which ends here if it has not; None if screened."""
        outcome = self._finished()
        return None if outcome.screened else outcome.reward

    def _finished(self) -> Outcome:
        if self._session is None:
            raise RuntimeError("the environment has no episode: call reset first")
        if self._outcome is None:
            self._outcome, self._done = self._session.outcome(), True
        return self._outcome

    def _call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        return self._say(call_text(tool, dict(arguments)))

    def _say(self, text: str) -> str:
        """Apply an action of the model; keep its error site, by the number of the action."""
        if self._session is None or self._done:
            return ENDED
        step = self._session.step(text)
        if step.error is not None:
            self._sites.append(step.error)
        self._steps, self._done = self._steps + 1, step.done
        return "\n".join(str(one.get("content") or "") for one in step.messages) or ENDED

    def _close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def __del__(self) -> None:
        if getattr(self, "_session", None) is not None:
            self._close()


class TaskEnvironments:
    """Makes environments of a task for TRL; rewards are logged under `name`."""

    def __init__(self, task: Task, name: str = "") -> None:
        self.task, self.name = task, name or type(task).__name__
        if not self.name.isidentifier():
            raise ValueError(f"name is {self.name!r}: write the name of a class")
        methods = {
            schema["function"]["name"]: tool_method(
                schema["function"]["name"],
                schema["function"].get("description", ""),
                schema["function"].get("parameters", {}),
            )
            for schema in task.tools
        }
        self._class = type(self.name, (TaskEnvironment,), {**methods, "_task": task})

    def __call__(self) -> Any:
        return self._class()


def environment_rows(
    task: Task, count: int, split: Split = "train", first: int = 0
) -> list[dict[str, Any]]:
    """Return the rows of a data set for `TaskEnvironments`: prompt, split and index."""
    rows = []
    for index in range(first, first + count):
        with SyncSession(task, task.episode(split, index)) as session:
            rows.append({"prompt": session.messages, "split": split, "index": index})
    return rows
