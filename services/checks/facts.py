"""Facts of a run that are known before it starts: its rows, its model, and the work of a step."""

from collections.abc import Iterator

from composer_mesh.configs.schema import Config
from composer_mesh.planning.model_sizes import UnknownSizes, parameter_count, sizes_of
from composer_mesh.services.checks.task import training_rows
from composer_mesh.tasks.task import Task

TIME = "time of a step: not known before the first one, after which the run reports it"


def facts_of(config: Config, task: Task, heldout: int) -> Iterator[str]:
    """Yield lines of them, and of what is not known."""
    for part in task.parts:
        rows = training_rows(part)
        yield f"training rows of {part.name!r}: {'generated' if rows is None else f'{rows:,}'}"
    yield f"an evaluation: {heldout:,} held-out episodes"
    yield f"policy: {_model(config)}, contexts of at most {config.policy.max_context:,} tokens"
    schedule, generator = config.schedule, config.generator
    rollouts = schedule.prompts_per_step * schedule.group_size
    longest = min(
        config.policy.max_context, config.environment.max_turns * generator.max_new_tokens
    )
    yield (
        f"a step: {schedule.prompts_per_step} groups of {schedule.group_size} rollouts, at most "
        f"{rollouts * longest:,} sampled tokens ({longest:,} each), "
        f"{rollouts * config.policy.max_context:,} with all that they read; computed in "
        f"microbatches of {config.trainer.microbatch_tokens:,}"
    )
    yield TIME


def _model(config: Config) -> str:
    try:
        sizes = sizes_of(config.policy)
    except UnknownSizes as unknown:
        return f"parameters not counted ({unknown})"
    return f"{parameter_count(sizes):,} parameters, {sizes.vocab_size:,} tokens of vocabulary"
