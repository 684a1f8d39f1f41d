"""What the controller needs from the world, as protocols: fakes and actors both fit.

No behaviour here. Real ports call actors, tests pass hand-written ones.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from composer_mesh.rollouts.batches import PairSample, StepBatch
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.hint_prompts import HintReply, HintRequest
from composer_mesh.rollouts.pairs import FrozenState, TeacherReply
from composer_mesh.rollouts.poison import PoisonedInput
from composer_mesh.rollouts.tasks import Episode, StepResult
from composer_mesh.rollouts.traces import Message, Trace
from composer_mesh.services.directory.report import Evaluation

MayTrain = Callable[[], None]


class Generation(Protocol):
    """Samples tokens. An episode announces itself first, so that batches can be closed."""

    def episode(self) -> AbstractContextManager[None]: ...

    async def generate(self, request: GenerationRequest) -> GenerationResult: ...


class Environments(Protocol):
    """Steps episodes, each in a session that is begun, and then finished or abandoned."""

    async def begin(self, session_id: str, episode: Episode) -> list[Message]: ...

    async def step(self, session_id: str, text: str) -> StepResult: ...

    async def finish(self, session_id: str) -> list[Message]: ...

    def abandon(self, session_id: str) -> None: ...


class Teachers(Protocol):
    """Asks external teachers."""

    async def query(self, state: FrozenState, n: int) -> list[TeacherReply]: ...


class Reference(Protocol):
    """The frozen initial policy: summed log-probs of both answers of each pair, in their order."""

    async def score(self, samples: Sequence[PairSample]) -> list[tuple[float, float]]: ...


class HintWriter(Protocol):
    """Words hints; one reply for each request, in their order, and none of them is an error."""

    async def write(self, requests: Sequence[HintRequest]) -> list[HintReply]: ...


class Training(Protocol):
    """Makes version v+1 out of a batch; returns the step's metrics."""

    async def train(self, batch: StepBatch) -> dict[str, Any]: ...


class WeightSync(Protocol):
    """Brings the trainer's newest version to everyone who serves it; returns that version.

    `on_snapshot` is called once the version is copied: the next step may then be trained while the
    weights are still being transferred. Without it, nothing is trained meanwhile.
    """

    async def sync(self, on_snapshot: MayTrain | None = None) -> int: ...


class Store(Protocol):
    """Keeps what a run produces before anything is made of it.

    What is awaited is on disk then; the rest is queued, and its failure ends the next awaited call.
    """

    def enter(self, group_id: int, version: int) -> None: ...

    def add_evaluation(self, evaluation: Evaluation) -> None: ...

    def add_poisoned(self, poisoned: PoisonedInput) -> None: ...

    async def add_group(self, group_id: int, traces: Sequence[Trace]) -> list[Trace]: ...

    async def add_worded(self, group_id: int, worded: bytes) -> None: ...

    async def plan_step(
        self,
        step: int,
        groups: Sequence[int],
        manifest: bytes,
        pairs: Sequence[str] = (),
        max_age: int | None = None,
        rewards: Mapping[int, str] | None = None,
    ) -> None: ...

    async def end_step(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def waits(self) -> dict[str, float]: ...


class Watcher(Protocol):
    """Is told what happens, to show it."""

    def update(self, step: Mapping[str, Any]) -> None: ...

    def evaluation(self, evaluation: Evaluation) -> None: ...

    def phase(self, text: str) -> None: ...
