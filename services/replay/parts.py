"""Factories that build a run's pair stream and late rewards from its config."""

from collections.abc import Callable, Sequence
from functools import partial

from composer_mesh.channels.replay.samples import pair_samples
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.pair_filters import PairFilters
from composer_mesh.services.replay.late_rewards import LateRewards
from composer_mesh.services.replay.pair_stream import PairStore, PairStream, Refining
from composer_mesh.services.replay.teacher_queries import Replay
from composer_mesh.services.steps.advantages import Advantages
from composer_mesh.services.steps.ports import Reference, Teachers
from composer_mesh.services.store.rows import LateReward


def make_pair_stream(
    config: Config,
    teachers: Teachers,
    reference: Reference | None,
    chat: ChatFormat,
    store: PairStore,
    waiting: Callable[[], int],
) -> PairStream:
    """Build the pair stream over the port `teachers`; `waiting` counts the pairs not yet taken."""
    prompts, seed = config.schedule.prompts_per_step, config.run.seed
    encode = partial(pair_samples, chat=chat, max_context=config.policy.max_context)
    refining = Refining(PairFilters(config.replay.filters), encode, reference)
    replay = Replay(teachers, config.replay, prompts, seed)
    return PairStream(replay, refining, store, waiting, config)


def make_late_rewards(
    config: Config,
    waiting: Callable[[], Sequence[LateReward]],
    advantages: Advantages,
    report: Callable[[str], object],
) -> LateRewards | None:
    """Build the reader of posted rewards; None where late rewards are off."""
    if not config.late_rewards.on:
        return None
    return LateRewards(waiting, advantages, config.late_rewards.max_age, report)
