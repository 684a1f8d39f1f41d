"""Settings and set-ups of TRL in which the further channels cannot be computed.

Imports no TRL.
"""

from typing import Any

from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.configs.advantages import GroupAdvantage
from composer_mesh.configs.channels import ChannelSchedule
from composer_mesh.configs.preference import WeightedPreferenceConfig
from composer_mesh.configs.replay import ReplayConfig
from composer_mesh.configs.schema import Config
from composer_mesh.configs.sdpo import SdpoConfig
from composer_mesh.plugins.frameworks.trl.channels import base_model, evaluating
from composer_mesh.plugins.frameworks.trl.pairs import PairSource

PairLoss = WeightedPreferenceConfig
"""The preference loss and its weight `beta`."""
OF_RUNS = (
    "sites",
    "advantage_sites",
    "right_action",
    "min_advantage",
    "min_advantage_wins",
    "min_update_share",
    "max_update_share",
)
"""Settings of the SDPO channel that the step of a run reads, and TRL's does not."""
WHOLE = "computes log-probs of the whole distribution"


def check_channels(sdpo: SdpoConfig, replay: PairLoss, pairs: PairSource | None) -> None:
    """Raise ValueError for settings that TRL's trainer cannot keep."""
    if sdpo.on and sdpo.teacher not in ("live", "frozen"):
        raise ValueError(
            f"sdpo.teacher is {sdpo.teacher!r}, but inside of TRL it can be 'live' or 'frozen': "
            "set one of them, or train with composer-mesh"
        )
    if sdpo.on and sdpo.hints.active_writer is not None:
        raise ValueError(
            "sdpo.hints asks a model to write hints, which needs the actors of composer-mesh: "
            "leave the writer out, so that hints come from templates"
        )
    if sdpo.alpha_schedule != ChannelSchedule():
        raise ValueError(
            "sdpo.alpha_schedule changes alpha by the step of a run of composer-mesh, and TRL has "
            "another count of steps: leave it out"
        )
    for name in OF_RUNS:
        value = getattr(sdpo, name)
        is_off = name == "advantage_sites" and not value
        if not is_off and value != type(sdpo).model_fields[name].default:
            raise ValueError(
                f"sdpo.{name} is {value!r}, which only a run of composer-mesh keeps: leave it "
                "out, or train with composer-mesh"
            )
    if isinstance(replay, ReplayConfig) and replay.update == "own":
        raise ValueError(
            "replay.update is 'own', but TRL has one optimizer: set it to 'shared', or train with "
            "composer-mesh"
        )
    if replay.on and pairs is None:
        raise ValueError(
            f"replay.beta is {replay.beta} but there are no pairs: pass pairs=StoredPairs(...) or "
            "pairs=TeacherPairs(...), or set beta to 0"
        )


def check_trainer(trainer: Any) -> None:
    """Raise ValueError for a set-up of TRL in which the channels cannot be computed."""
    if not trainer._on:
        return
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    if plugin is not None and plugin.zero_stage == 3:
        raise ValueError(
            "DeepSpeed ZeRO-3 gathers no head outside of its own forward: use FSDP2 or ZeRO-2"
        )
    fsdp = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if fsdp is not None and fsdp.fsdp_version != 2:
        raise ValueError("FSDP1 flattens the weights of the head: set fsdp_version to 2")
    if trainer._is_vlm:
        raise ValueError("models of images and text are not supported: pass their text part")


def check_head(model: Any) -> None:
    """Raise `UnsupportedHead` for a model whose logits are not those of its hidden states and head.

    A process that gets its weights later has nothing to compare.
    """
    if any(weights.is_meta for weights in model.parameters()):
        return
    with evaluating(model):
        LanguageModel(base_model(model)).check_head()


def check_sharded(trainer: Any, replay: PairLoss) -> None:
    """Raise ValueError for a reference that ranks of a sharded model cannot compute apart."""
    if replay.needs_reference and trainer._initial is None:
        raise ValueError(
            f"replay.loss is {replay.loss!r}, whose reference is the sharded model without its "
            "adapters: set loss to 'simpo', or do not shard"
        )


def check_async_grpo(config: Config, args: Any) -> None:
    """Raise ValueError where a config and TRL's `AsyncGRPOConfig` contradict each other."""
    schedule, generator = config.schedule, config.generator
    for key, own, theirs, value in (
        ("schedule.group_size", schedule.group_size, "num_generations", args.num_generations),
        ("schedule.max_lag", schedule.max_lag, "max_staleness", args.max_staleness),
        ("generator.temperature", generator.temperature, "temperature", args.temperature),
    ):
        if own != value:
            raise ValueError(
                f"{key} is {own} but {theirs} of AsyncGRPOConfig is {value}: set both to the same"
            )
    if args.max_staleness < 1:
        raise ValueError(
            f"max_staleness is {args.max_staleness}, with which rollouts that are played while "
            "weights are sent would all be dropped: set it and schedule.max_lag to 1 or more"
        )
    if args.token_budget is None:
        raise ValueError(
            "token_budget is None, for which TRL asks a vLLM server: set it to "
            f"{config.policy.max_context} or more (policy.max_context), or to 0 for batches of "
            "per_device_train_batch_size"
        )
    if 0 < args.token_budget < config.policy.max_context:
        raise ValueError(
            f"token_budget is {args.token_budget} but policy.max_context is "
            f"{config.policy.max_context}, and TRL drops longer rollouts: raise token_budget or "
            "lower max_context"
        )
    _refuse_unused(config)


def _refuse_unused(config: Config) -> None:
    """Raise ValueError for settings that AsyncGRPOTrainer cannot keep."""
    generator, schedule = config.generator, config.schedule
    for key, is_set, why in (
        ("sdpo.alpha", config.sdpo.on, "trains no hints: set it to 0"),
        ("replay.beta", config.replay.on, "trains no pairs: set it to 0"),
        ("advantage", config.advantage != GroupAdvantage(), "has its own: leave it out"),
        ("data.curriculum", config.data.curriculum, "reports no results of its steps: remove it"),
        (
            "schedule.carried_groups",
            schedule.carried_groups,
            "takes groups as they enter: set it to 0",
        ),
        ("late_rewards.max_age", config.late_rewards.on, "keeps no trained step: set it to 0"),
        ("tracking", config.tracking, "logs by its own report_to: remove it"),
        ("islands.store", config.islands.on, "averages with no other run: remove it"),
        ("trainer.lora.sync", config.syncs_adapters, "sends merged weights: set it to 'merged'"),
        ("generator.top_p", generator.top_p < 1, f"{WHOLE}: set it to 1"),
        ("generator.top_k", generator.top_k, f"{WHOLE}: set it to 0"),
        ("generator.min_p", generator.min_p, f"{WHOLE}: set it to 0"),
    ):
        if is_set:
            raise ValueError(f"{key} is set, but AsyncGRPOTrainer {why}")


def rollouts_at_once(args: Any) -> int:
    """Return how many rollouts may be played or wait, so that none is too old when it is trained.

    Raises ValueError where not even one group may.
    """
    step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    bounds = [
        (
            args.max_staleness * step,
            f"max_staleness times the samples of a step is {args.max_staleness} * {step}",
        )
    ]
    if args.max_inflight_tasks >= 0:
        bounds.append((args.max_inflight_tasks, f"max_inflight_tasks is {args.max_inflight_tasks}"))
    if args.queue_maxsize > 0:
        bounds.append((args.queue_maxsize, f"queue_maxsize is {args.queue_maxsize}"))
    most, why = min(bounds)
    if most < args.num_generations:
        raise ValueError(
            f"{why}, but a group has {args.num_generations} rollouts, so that no group may enter: "
            f"raise it to {args.num_generations} or more; a step has per_device_train_batch_size * "
            "gradient_accumulation_steps * processes samples"
        )
    return most
