"""An engine of another package: the embedded one, in which the expert of Harbor tasks speaks.

The expert writes the tokens, and the model gives each of them its log-prob, by the forwards and
under the temperature with which it would sample. A harness needs an agent that calls its tools;
no model that fits a test does. What was answered is written down, request by request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from composer_mesh.actors.engines.embedded import EmbeddedEngine
from composer_mesh.actors.engines.port import Admitted, RequestAborted, ResultCallback
from composer_mesh.actors.models.policy import load_model
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.tool_calls import call_text

SERVED = "served.jsonl"
"""The file, next to the model's folder, of what was answered."""
SHELLS = {"Bash": "command", "exec_command": "cmd", "bash": "command"}
"""The argument with a command, by the name of a harness's shell."""
LAST = "It is done."
LOOK = "ls -la"


def expert_answer(prompt: str, solutions: Mapping[str, str]) -> str:
    """Return what the expert says: a look, the solution of the task, and that it is done.

    `solutions` are commands by instruction.
    """
    turn = prompt.count("<|im_start|>assistant") - 1
    shell = next(name for name in SHELLS if f'"name": "{name}"' in prompt)
    solution = solutions[max((one for one in solutions if one in prompt), key=len)]
    calls = [call_text(shell, {SHELLS[shell]: one}) for one in (LOOK, solution)]
    return calls[turn] if turn < len(calls) else LAST


def solutions_of(tasks: Path) -> dict[str, str]:
    """Return the oracle solutions of a folder of tasks, by instruction."""
    return {
        (one / "instruction.md").read_text().strip(): (one / "solution/solve.sh").read_text()
        for one in tasks.iterdir()
    }


class ExpertEngine(EmbeddedEngine):
    """Serves a model whose tokens are the expert's."""

    def __init__(self, config: Config, folder: Path, tokenizer: Any) -> None:
        super().__init__(
            load_model(folder), config.generator.max_concurrent, config.policy.max_context
        )
        self._chat = ChatFormat(tokenizer, [])
        self._solutions = solutions_of(Path(str(config.data.path)))
        self._answers: dict[str, list[int]] = {}
        self._served = folder.parent / SERVED

    def submit(
        self, request: GenerationRequest, done: ResultCallback, admitted: Admitted | None = None
    ) -> None:
        """Queue a request with the ids of the expert's answer."""
        prompt = self._chat.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
        answer = self._chat.action(expert_answer(prompt, self._solutions))
        self._answers[request.request_id] = answer

        def answered(result: GenerationResult | RequestAborted) -> None:
            if isinstance(result, GenerationResult):
                self._write(request, result)
            done(result)

        super().submit(request, answered, admitted)

    def _write(self, request: GenerationRequest, result: GenerationResult) -> None:
        row = {
            "request": request.request_id,
            "prompt": request.prompt_ids,
            "ids": result.token_ids,
            "logprobs": result.logprobs,
            "versions": result.versions,
            "cached": result.cached_tokens,
        }
        with self._served.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _decoded(self) -> tuple[list[int], list[float]]:
        rows = len(self._running)
        return self._sample(self._compute(rows, [], {}, keep=list(range(rows))))

    def _sample(self, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """Return the expert's next ids and their log-probs of logits `[running, V]`."""
        said = [self._answers[one.request.request_id][len(one.token_ids)] for one in self._running]
        heat = torch.tensor([one.request.temperature or 1.0 for one in self._running])
        logprobs = torch.log_softmax(logits / heat[:, None], -1)
        chosen = logprobs.gather(-1, torch.tensor(said)[:, None])[:, 0]
        return said, chosen.tolist()


def start(config: Config, folder: Path) -> ExpertEngine:
    """Return the engine, serving the model of a folder as version 0."""
    from transformers import AutoTokenizer

    return ExpertEngine(config, folder, AutoTokenizer.from_pretrained(folder))
