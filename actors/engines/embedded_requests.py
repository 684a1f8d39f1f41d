"""The requests of the embedded engine: those that run, and those that join them in a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from composer_mesh.actors.engines.embedded_attention import Run
from composer_mesh.actors.engines.port import Admitted, ResultCallback
from composer_mesh.actors.engines.radix_tree import Ids
from composer_mesh.rollouts.expert_choices import ExpertChoices
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.traces import StopReason


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request and what it has sampled; `cached` tokens of its prompt were not computed for it."""

    request: GenerationRequest
    done: ResultCallback
    admitted: Admitted | None
    draws: list[float]
    prompt: Ids
    cached: int = 0
    aborted: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: ExpertChoices | None = None

    @property
    def finished(self) -> StopReason | None:
        """Why nothing more is sampled; None while it goes on."""
        if self.token_ids and self.token_ids[-1] in self.request.stop_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.request.max_new_tokens else None

    def answer(self, reason: StopReason) -> None:
        """Hand over the result."""
        name, sampled = self.request.request_id, (self.token_ids, self.logprobs, self.versions)
        self.done(GenerationResult(name, *sampled, reason, self.cached, self.experts))


@dataclass(slots=True)
class JoiningRows:
    """Rows that start in this step, after those that decode, and a piece of a long prompt."""

    runs: list[Run] = field(default_factory=list)
    leaders: list[int] = field(default_factory=list)
    """For each new row the row with the same prompt, its own index where it is computed."""
    by_prompt: dict[bytes, int] = field(default_factory=dict)
    tokens: int = 0

    def compute(self, run: Run) -> None:
        """Add tokens that this step's forward computes."""
        self.runs.append(run)
        self.tokens += run.end - run.start
