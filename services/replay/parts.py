"""What a run's third channel is made of: the pair stream and the late rewards, from its config.

Only puts parts together; each says itself what it does.
"""

from collections.abc import Callable
from functools import partial

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.batches import pair_samples
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.pair_filters import PairFilters
from composer_mesh.services.advantages import Advantages
from composer_mesh.services.ports import Reference, Store, Teachers
from composer_mesh.services.replay.asking import Replay
from composer_mesh.services.replay.late_rewards import LateRewards
from composer_mesh.services.replay.late_store import LateStore
from composer_mesh.services.replay.pair_stream import PairStream
from composer_mesh.services.replay.refining import Refining


def make_pair_stream(
    config: Config,
    teachers: Teachers,
    reference: Reference | None,
    chat: ChatFormat,
    store: Store,
    late: LateStore,
    start: int = 0,
) -> PairStream:
    """The channel of a run whose teachers are asked by `teachers`, from step `start` on."""
    prompts, seed = config.schedule.prompts_per_step, config.run.seed
    encode = partial(pair_samples, chat=chat, max_context=config.policy.max_context)
    refining = Refining(PairFilters(config.replay.filters), encode, reference)
    replay = Replay(teachers, config.replay, prompts, seed)
    return PairStream(replay, refining, late, config, store.add_pairs, start)


def make_late_rewards(
    config: Config, late: LateStore, advantages: Advantages, report: Callable[[str], None]
) -> LateRewards | None:
    """The reader of posted rewards, None where the run takes none."""
    if not config.late_rewards.on:
        return None
    return LateRewards(late, advantages, config.late_rewards.max_age, report)
