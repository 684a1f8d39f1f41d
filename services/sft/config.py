"""The config of a supervised run: that of a run, with the steps of [sft] and one channel.

The policy channel's REINFORCE with advantage 1 at temperature 1 is next-token cross-entropy, summed
over the imitated tokens of a step and divided by their number.
"""

from composer_mesh.configs.advantages import GroupAdvantage
from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.logprob_mismatch import LogprobMismatchConfig
from composer_mesh.configs.losses import ReinforceLoss
from composer_mesh.configs.schedule import LateRewardsConfig, ScheduleConfig
from composer_mesh.configs.schema import LONGEST_NAME, Config
from composer_mesh.services.directory.sft_start import SUFFIX


def sft_config(config: Config) -> Config:
    """Return the config of the supervised run of a config; raises ConfigError without [sft]."""
    sft = config.sft
    if sft is None:
        raise ConfigError(
            "the config has no section [sft]: add it with steps, and with path or demonstrations"
        )
    name = f"{config.run.name}{SUFFIX}"
    if (over := len(name) - LONGEST_NAME) > 0:
        raise ConfigError(
            f"run.name has {len(config.run.name)} characters, and the supervised run adds "
            f"{SUFFIX!r} to it, which makes more than {LONGEST_NAME}: shorten it by {over}"
        )
    rate = {"lr": sft.lr, "lr_schedule": sft.lr_schedule, "warmup_steps": sft.warmup_steps}
    alone = {"min_lr_ratio": 0.0, "updates_per_batch": 1, "epochs": 1, "update_share_every": 0}
    moe = config.trainer.moe.model_copy(update={"router_replay": False, "compare_every": 0})
    sections = {
        "run": {"name": name, "steps": sft.steps},
        "data": {"curriculum": None, "options": {**config.data.options, **sft.options}},
        "policy": {"start": "base"},
        "generator": {"temperature": 1.0},
        "trainer": {**rate, **alone, "moe": moe},
        "sdpo": {"alpha": 0.0},
        "replay": {"beta": 0.0},
        "placement": {"colocate": False},
    }
    changed = {
        name: getattr(config, name).model_copy(update=keys) for name, keys in sections.items()
    }
    return config.model_copy(
        update={
            **changed,
            "loss": ReinforceLoss(type="reinforce"),
            "advantage": GroupAdvantage(),
            "schedule": ScheduleConfig(max_lag=0),
            "logprob_mismatch": LogprobMismatchConfig(),
            "late_rewards": LateRewardsConfig(),
            "channels": {},
        }
    )
