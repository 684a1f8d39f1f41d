"""Calls a custom loss or advantage function in a process of its own, which is ended if it is late.

The function is the user's, and may run for ever: a thread of this process could not be ended. What
runs there is `custom_function_program`. A run calls advantages so; before a run, a loss and an
advantage are called once on small examples. Imports no torch.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from composer_mesh.configs.advantages import CustomAdvantage
from composer_mesh.configs.losses import CustomLoss
from composer_mesh.configs.schema import Config
from composer_mesh.configs.user_code import CustomFunctionError
from composer_mesh.mesh.environment import python_module
from composer_mesh.mesh.programs import AnsweringProgram, ProgramFailed
from composer_mesh.planning.model_sizes import UnknownSizes, sizes_of
from composer_mesh.rollouts.traces import Trace, Turn

PROGRAM = "composer_mesh.services.steps.custom_function_program"
LOAD_S = 300.0
"""Longest wait for the import of the function's module, torch included."""
PROMPTS = 3
"""Groups of an example: the last one has equal rewards, which is common in a run."""


class FunctionRequests(Protocol):
    """Answers the requests that `custom_function_program` describes."""

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]: ...


Start = Callable[[str, float], FunctionRequests]


class CustomFunctionProcess:
    """Answers requests about a function in a process, which ends with this object.

    A request that takes longer than `limit_s` ends it, and is a `CustomFunctionError`.
    """

    def __init__(self, import_path: str, limit_s: float) -> None:
        self._path, self._limit_s = import_path, limit_s
        self._program = AnsweringProgram(python_module(PROGRAM), os.environ, shows_errors=True)
        weakref.finalize(self, self._program.close)
        self._loaded, self._one_at_a_time = False, threading.Lock()

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer. Waits for it, at most `limit_s`, or `LOAD_S` for the first."""
        with self._one_at_a_time:
            limit_s = self._limit_s if self._loaded else max(LOAD_S, self._limit_s)
            try:
                line = self._program.ask(json.dumps(request).encode(), limit_s)
            except ProgramFailed as error:
                raise CustomFunctionError(
                    self._path,
                    "",
                    f"it did not return within {limit_s:g} s, or its process ended "
                    f"({error.said}): look for a loop without end in it, or raise "
                    "supervision.custom_function_s",
                ) from None
            self._loaded = True
        found: dict[str, Any] = json.loads(line)
        return found


def answer_of(function: FunctionRequests, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a request; raises the `CustomFunctionError` of a refusal."""
    answer = function.answer(request)
    if "refused" in answer:
        error = CustomFunctionError(*answer["refused"])
        error.add_note(answer["traceback"])
        raise error
    return answer


def shown_rollout(trace: Trace) -> Mapping[str, Any]:
    """Return what a custom advantage function may read of a rollout; `reward` is PRIME-RL's key."""
    return {
        "reward": trace.reward,
        "turn_rewards": list(trace.turn_rewards),
        "trace_id": trace.trace_id,
        "success": trace.success,
        "turns": len(trace.turns),
        "completion_len": trace.action_tokens(),
        "error_sites": len(trace.error_sites),
    }


def try_custom_functions(config: Config, start: Start = CustomFunctionProcess) -> None:
    """Import the config's loss and advantage function and call each on an example.

    Raises `CustomFunctionError` for one that a run could not use. Waits for each at most
    `supervision.custom_function_s`. Without a custom function it starts nothing.
    """
    limit_s = config.supervision.custom_function_s
    if isinstance(loss := config.loss, CustomLoss):
        function = start(loss.import_path, limit_s)
        path, needs = loss.import_path, list(loss.needs)
        answer_of(function, {"import_path": path, "kwargs": loss.kwargs, "needs": needs})
        sizes = {"needs": needs, "reference": loss.reference, **_sizes(config)}
        answer_of(function, {"example": sizes})
    if isinstance(advantage := config.advantage, CustomAdvantage):
        function = start(advantage.import_path, limit_s)
        answer_of(function, {"import_path": advantage.import_path, "kwargs": advantage.kwargs})
        answer_of(function, _example_groups(config))


def _sizes(config: Config) -> dict[str, int]:
    """Return the sizes of logits and hidden states; of a model without known sizes, none."""
    try:
        sizes = sizes_of(config.policy)
    except UnknownSizes:
        return {}
    return {"vocabulary": sizes.vocab_size, "hidden": sizes.hidden_size}


def _example_groups(config: Config) -> dict[str, Any]:
    """Return a request with groups of the configured size, the last one of equal rewards.

    With dynamic sampling no step has such a group, so that all differ.
    """
    size, last = config.schedule.group_size, PROMPTS - 1
    flat = not config.schedule.dynamic_sampling
    groups = [
        [
            _example(f"example-{row}-{column}", float(column % 2 and not (flat and row == last)))
            for column in range(size)
        ]
        for row in range(PROMPTS)
    ]
    return {
        "groups": [[shown_rollout(trace) for trace in group] for group in groups],
        "ids": [[trace.trace_id for trace in group] for group in groups],
    }


def _example(name: str, reward: float) -> Trace:
    turn = Turn([1, 2, 3], [4, 5], [-0.5, -0.25], [0, 0], "stop")
    return Trace(name, 0, 0, "example", "train", 0, [turn], [], reward, reward > 0, [])
