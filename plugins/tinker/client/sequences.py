"""The sequences of a three-channel step, and the arrays in which a server trains them.

Knows neither the SDK nor HTTP; everything is token ids.

Axes: T tokens that a model reads, C = 1 + K targets of each: its next id, then K ids of a teacher;
N tokens of a hinted answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from composer_mesh.rollouts.alignment import HintedView, aligned_view

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Turn:
    """One answer of a model: the ids before it since the last one, its ids, their log-probs."""

    context: Sequence[int]
    action: Sequence[int]
    logprobs: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.action) != len(self.logprobs):
            raise ValueError(
                f"a turn has {len(self.action)} ids and {len(self.logprobs)} log-probs: give one "
                "for each id that was sampled"
            )


@dataclass(frozen=True)
class Rollout:
    """An attempt of some turns at a task, with its advantage."""

    turns: Sequence[Turn]
    advantage: float

    @property
    def ids(self) -> list[int]:
        """All ids, in order."""
        return [one for turn in self.turns for part in (turn.context, turn.action) for one in part]

    @property
    def sampled(self) -> int:
        """Number of ids that the model sampled."""
        return sum(len(turn.action) for turn in self.turns)

    def start_of(self, turn: int) -> int:
        """Return where a turn's answer begins among all ids."""
        before = sum(len(one.context) + len(one.action) for one in self.turns[:turn])
        return before + len(self.turns[turn].context)


@dataclass(frozen=True)
class TeacherTopK:
    """A teacher's most probable ids [N, K] at each token of an answer, and their log-probs."""

    ids: Ints
    logprobs: Floats


@dataclass(frozen=True)
class Hinted:
    """A turn of a rollout, as its teacher reads it: with a hint before the answer."""

    rollout: Rollout
    view: HintedView
    teacher: TeacherTopK | None = None


def hinted(
    rollout: Rollout, turn: int, hint_ids: Sequence[int], generation_prompt: Sequence[int]
) -> Hinted:
    """Return a turn with a hint before the generation prompt, which its context ends with.

    Raises `MisalignedError` where it does not.
    """
    start = rollout.start_of(turn)
    context, action = rollout.ids[:start], list(rollout.turns[turn].action)
    view = aligned_view("", turn, context, action, list(hint_ids), list(generation_prompt))
    return Hinted(rollout, view)


@dataclass(frozen=True)
class Pair:
    """Two answers to one context, and the log-probs of their ids under a frozen reference."""

    context: Sequence[int]
    chosen: Sequence[int]
    rejected: Sequence[int]
    chosen_logprobs: Sequence[float] = ()
    rejected_logprobs: Sequence[float] = ()

    @property
    def sides(self) -> list[tuple[list[int], Sequence[float], int]]:
        """All ids of each side, its reference log-probs, and 1 for the chosen, -1 for the other."""
        return [
            ([*self.context, *self.chosen], self.chosen_logprobs, 1),
            ([*self.context, *self.rejected], self.rejected_logprobs, -1),
        ]


@dataclass(frozen=True)
class ThreeChannelStep:
    """All that one optimizer step trains, and the weights of its channels.

    Losses are divided by the sampled ids, the hinted ids and the pairs of the whole step.
    """

    rollouts: Sequence[Rollout]
    hinted: Sequence[Hinted] = ()
    pairs: Sequence[Pair] = ()
    alpha: float = 0.05
    beta: float = 0.05
    jsd_beta: float = 0.5
    dpo_beta: float = 0.1
    clip_low: float = 0.2
    clip_high: float = 0.28

    def __post_init__(self) -> None:
        for one in self.hinted:
            if not any(one.rollout is other for other in self.rollouts):
                raise ValueError("a hinted turn is of no rollout of this step: add its rollout")
            if one.teacher is None:
                raise ValueError("a hinted turn has no ids of a teacher: see `teacher_topk`")
            if len(one.teacher.ids) != len(one.view.targets):
                raise ValueError(
                    f"a teacher has {len(one.teacher.ids)} rows for an answer of "
                    f"{len(one.view.targets)} ids: query it about the view's own ids"
                )
        for pair in self.pairs:
            for ids, logprobs, _ in pair.sides:
                if len(ids) - len(pair.context) != len(logprobs):
                    raise ValueError(
                        f"an answer of {len(ids) - len(pair.context)} ids has {len(logprobs)} "
                        "log-probs of the reference: see `with_reference`"
                    )

    @property
    def k(self) -> int:
        """Ids of teachers at one token, the most that any has."""
        found = [one.teacher.ids.shape[1] for one in self.hinted if one.teacher is not None]
        return max(found, default=0)

    @property
    def tokens(self) -> int:
        """Ids that policies sampled."""
        return max(1, sum(one.sampled for one in self.rollouts))

    @property
    def hinted_tokens(self) -> int:
        """Ids of hinted answers."""
        return max(1, sum(len(one.view.targets) for one in self.hinted))

    @property
    def options(self) -> dict[str, float]:
        """The options of the loss `three_channel`."""
        return {
            "alpha": self.alpha,
            "beta": self.beta,
            "jsd_beta": self.jsd_beta,
            "dpo_beta": self.dpo_beta,
            "clip_low_threshold": 1 - self.clip_low,
            "clip_high_threshold": 1 + self.clip_high,
        }


@dataclass(frozen=True)
class Arrays:
    """One sequence as a server reads it: ids [T], targets and inputs of a loss [T] or [T, C]."""

    tokens: Ints
    inputs: Mapping[str, NDArray[Any]]


@dataclass
class Draft:
    """The arrays of one sequence while they are filled; position t is about the id at t + 1."""

    ids: Sequence[int]
    columns: int
    inputs: dict[str, NDArray[Any]] = field(init=False)

    def __post_init__(self) -> None:
        shape = (len(self.ids) - 1, self.columns)
        names = ("logprobs", "advantages", "weights", "preference")
        self.inputs = {name: np.zeros(shape, np.float32) for name in names}
        targets = np.zeros(shape, np.int64)
        targets[:, 0] = self.ids[1:]
        self.inputs["target_tokens"] = targets

    def set(self, name: str, first: int, values: Sequence[float] | float, count: int) -> None:
        """Set an input of `count` ids from `first` on."""
        self.inputs[name][first - 1 : first - 1 + count, 0] = values

    def add_teacher(self, one: Hinted, weight: float) -> None:
        """Enter a teacher's ids at the rows of a hinted answer."""
        assert one.teacher is not None
        rows, own = one.view.student_rows, slice(1, 1 + one.teacher.ids.shape[1])
        if self.inputs["weights"][rows, 1:].any():
            raise ValueError("two hints are for one turn: keep one of them")
        self.inputs["target_tokens"][rows, own] = one.teacher.ids
        self.inputs["logprobs"][rows, own] = one.teacher.logprobs
        self.inputs["weights"][rows, own] = weight

    def done(self) -> Arrays:
        """Return the arrays; without columns for teachers they are [T]."""
        flat = self.columns == 1
        inputs = {name: one[:, 0] if flat else one for name, one in self.inputs.items()}
        return Arrays(np.asarray(self.ids[:-1], np.int64), inputs)


def three_channel_arrays(step: ThreeChannelStep) -> list[Arrays]:
    """Return the sequences of the loss `three_channel`: rollouts, then both sides of each pair."""
    own = [_of_rollout(one, step) for one in step.rollouts]
    return own + [one for pair in step.pairs for one in _of_pair(pair, step)]


def _of_rollout(rollout: Rollout, step: ThreeChannelStep) -> Arrays:
    views = [one for one in step.hinted if one.rollout is rollout]
    draft = Draft(rollout.ids, 1 + (step.k if views else 0))
    for number, turn in enumerate(rollout.turns):
        first, count = rollout.start_of(number), len(turn.action)
        draft.set("logprobs", first, turn.logprobs, count)
        draft.set("advantages", first, rollout.advantage, count)
        draft.set("weights", first, 1 / step.tokens, count)
    for one in views:
        draft.add_teacher(one, 1 / step.hinted_tokens)
    return draft.done()


def _of_pair(pair: Pair, step: ThreeChannelStep) -> list[Arrays]:
    found = []
    for ids, logprobs, side in pair.sides:
        draft = Draft(ids, 1)
        draft.set("logprobs", len(pair.context), logprobs, len(logprobs))
        draft.set("preference", len(pair.context), side / len(step.pairs), len(logprobs))
        found.append(draft.done())
    return found
