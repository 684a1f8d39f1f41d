"""The controller's ports, as protocols that actors and test fakes implement. No behaviour."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from composer_mesh.rollouts.batches import PairSample, StepBatch
from composer_mesh.rollouts.episode import Played, Sample
from composer_mesh.rollouts.hints import HintReply, HintRequest
from composer_mesh.rollouts.pairs import FrozenState, TeacherReply
from composer_mesh.rollouts.tasks import Episode, FinishedRollout, GroupScore, PoisonedInput
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.directory.report import Evaluation

MayTrain = Callable[[], None]


class Player(Protocol):
    """Plays samples of episodes, each attempt in an environment session of its own.

    Samples are announced together before any of them is played: where batches are closed, one waits
    for a request of every announced sample whose context is not left yet. `score_group` returns the
    group rewards of an episode's finished samples.
    """

    def announce(self, samples: Sequence[Sample]) -> list[AbstractContextManager[None]]: ...

    async def play(self, sample: Sample, session: str) -> Played: ...

    async def score_group(
        self, episode: Episode, group: Sequence[FinishedRollout]
    ) -> GroupScore: ...

    async def close(self) -> None: ...


class Teachers(Protocol):
    """Queries external teachers."""

    async def query(self, state: FrozenState, n: int) -> list[TeacherReply]: ...


class Reference(Protocol):
    """The frozen initial policy.

    Returns the summed log-probs of both answers of each pair, in order.
    """

    async def score(self, samples: Sequence[PairSample]) -> list[tuple[float, float]]: ...


class HintWriter(Protocol):
    """Writes hint texts: one reply per request, in order; no failed request raises."""

    async def write(self, requests: Sequence[HintRequest]) -> list[HintReply]: ...


class JudgeCosts(Protocol):
    """Tells what judges have cost: the metrics `judge/…` since the last call."""

    async def figures(self) -> dict[str, float]: ...


class Training(Protocol):
    """Trains version v+1 on a batch of version v; returns the step's metrics, as JSON values.

    A batch of another version is refused, and nothing is trained. A step that fails raises its
    cause and makes no version.
    """

    async def train(self, batch: StepBatch) -> dict[str, Any]: ...


class WeightSync(Protocol):
    """Transfers the trainer's newest version to every process that serves it; returns that version.

    `on_snapshot` is called once the version is copied: the next step may then be trained while the
    weights are still being transferred. Without it, nothing is trained meanwhile.
    """

    async def sync(self, on_snapshot: MayTrain | None = None) -> int: ...


class Store(Protocol):
    """Persists what a run produces before it is used.

    Awaited calls return when the data is on disk; the others are queued, and a failure of theirs is
    raised by the next awaited call.
    """

    def enter(self, group_id: int, version: int) -> None: ...

    def add_evaluation(self, evaluation: Evaluation) -> None: ...

    def add_poisoned(self, poisoned: PoisonedInput) -> None: ...

    def add_event(self, kind: str, actor: str = "", detail: str = "") -> None: ...

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
    """Receives progress reports and displays them.

    Keeps no reference to what it is passed. No call waits or raises, whatever becomes of the
    display.
    """

    def update(self, step: Mapping[str, Any]) -> None: ...

    def evaluation(self, evaluation: Evaluation) -> None: ...

    def phase(self, text: str) -> None: ...
