"""How many rollout workers a run has: more of them, the more episodes it has in flight."""

from composer_mesh.configs.schema import Config

EPISODES_PER_WORKER = 256
MOST_WORKERS = 16


def rollout_workers(config: Config) -> int:
    """Return the configured number, or one for every `EPISODES_PER_WORKER` episodes in flight."""
    if config.rollouts.workers is not None:
        return config.rollouts.workers
    schedule = config.schedule
    training = schedule.prompts_per_step * schedule.samples_per_group * (schedule.max_lag + 1)
    in_flight = max(training, config.eval.episodes)
    return min(MOST_WORKERS, -(-in_flight // EPISODES_PER_WORKER))
