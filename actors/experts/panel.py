"""Rule-based experts with configured error rates, answering as chat completions.

The task defines the correct actions; the panel decides which expert errs where. The draw depends on
the seed, the expert and the conversation, never on order.
"""

import hashlib
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from composer_mesh.rollouts.hint_prompts import HINT_WRITER, builtin_wording
from composer_mesh.rollouts.tool_calls import assistant_message
from composer_mesh.rollouts.traces import Message

CHARS_PER_TOKEN = 4


class ExpertTask(Protocol):
    """Port to the task that experts act in."""

    def expert(self, messages: list[Message]) -> str: ...

    def corrupted(self, messages: list[Message], rng: random.Random) -> str: ...


@dataclass(frozen=True, slots=True)
class Expert:
    """A model id of the server, and the fraction of its actions that are wrong on purpose."""

    name: str
    error_rate: float


class UnknownExpert(LookupError):
    """No expert has this name."""


class ExpertPanel:
    """The experts of one run on one task; stateless after construction, hence thread-safe.

    `writes_hints` also serves the builtin hint writer.
    """

    def __init__(
        self,
        task: ExpertTask,
        seed: int,
        experts: Sequence[Expert],
        *,
        writes_hints: bool = False,
    ) -> None:
        for expert in experts:
            if not 0 <= expert.error_rate <= 1:
                raise ValueError(
                    f"error_rate of {expert.name!r} is {expert.error_rate}: give a share in [0, 1]"
                )
        self._task, self._seed, self._writes_hints = task, seed, writes_hints
        self._experts = {expert.name: expert for expert in experts}
        if len(self._experts) != len(experts):
            raise ValueError(f"{len(experts)} experts share names: give each its own")

    @property
    def names(self) -> list[str]:
        return [*self._experts, *([HINT_WRITER] if self._writes_hints else [])]

    def action(self, name: str, messages: list[Message]) -> str:
        """Return the expert's action text; raises the task's error for unreadable messages."""
        if self._writes_hints and name == HINT_WRITER:
            return builtin_wording(messages)
        expert = self._expert(name)
        rng = random.Random(f"{self._seed}:{name}:{fingerprint(messages)}")
        if rng.random() < expert.error_rate:
            return self._task.corrupted(messages, rng)
        return self._task.expert(messages)

    def completion(self, name: str, messages: list[Message]) -> dict[str, Any]:
        """Return the expert's action as an OpenAI chat completion; tokens are estimated, cost 0."""
        text = self.action(name, messages)
        digest = hashlib.sha256(f"{name}:{fingerprint(messages)}".encode()).hexdigest()
        message = assistant_message(text, f"call_{digest[:16]}")
        reason = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        return {
            "id": f"chatcmpl-{digest[:24]}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": name,
            "choices": [choice],
            "usage": _usage(messages, text),
        }

    def models(self) -> dict[str, Any]:
        """Return the experts as an OpenAI list of models."""
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "composer-mesh"}
            for name in self.names
        ]
        return {"object": "list", "data": data}

    def _expert(self, name: str) -> Expert:
        if name not in self._experts:
            raise UnknownExpert(f"model {name!r} is not served: ask {', '.join(self.names)}")
        return self._experts[name]


def fingerprint(messages: Sequence[Message]) -> str:
    """Return a hash of texts and calls, without call ids, which providers choose."""
    said = [
        [m.get("role"), m.get("content") or "", [c["function"] for c in m.get("tool_calls") or []]]
        for m in messages
    ]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _usage(messages: Sequence[Message], text: str) -> dict[str, Any]:
    prompt = -(-len(json.dumps(list(messages))) // CHARS_PER_TOKEN)
    written = -(-len(text) // CHARS_PER_TOKEN)
    counts = {"prompt_tokens": prompt, "completion_tokens": written}
    return {**counts, "total_tokens": prompt + written, "cost": 0.0}
