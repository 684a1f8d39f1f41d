"""Settings and set-ups of TRL in which the further channels cannot be computed.

Imports no TRL.
"""

from __future__ import annotations

from typing import Any

from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.configs.channel_schedule import ChannelSchedule
from composer_mesh.configs.preference import WeightedPreferenceConfig
from composer_mesh.configs.sdpo import SdpoConfig
from composer_mesh.integrations.trl.channels import base_model, evaluating
from composer_mesh.integrations.trl.pairs import PairSource

PairLoss = WeightedPreferenceConfig
"""The preference loss and its weight `beta`."""


def check_channels(sdpo: SdpoConfig, replay: PairLoss, pairs: PairSource | None) -> None:
    """Raise ValueError for settings that TRL's trainer cannot keep."""
    if sdpo.on and sdpo.teacher not in ("live", "frozen"):
        raise ValueError(
            f"sdpo.teacher is {sdpo.teacher!r}, but inside of TRL it can be 'live' or 'frozen': "
            "set one of them, or train with composer-mesh"
        )
    if sdpo.on and sdpo.hints.asked is not None:
        raise ValueError(
            "sdpo.hints asks a model to write hints, which needs the actors of composer-mesh: "
            "leave the writer out, so that hints come from templates"
        )
    if sdpo.alpha_schedule != ChannelSchedule():
        raise ValueError(
            "sdpo.alpha_schedule changes alpha by the step of a run of composer-mesh, and TRL has "
            "another count of steps: leave it out"
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
