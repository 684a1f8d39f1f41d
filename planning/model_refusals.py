"""Why a model cannot be trained or served as a config asks: errors with a complete message.

`check` raises them before anything is started, and the processes of a run where they find the same.
"""

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.worded import Worded


class UnfitModel(ConfigError):
    """A model that a run's config asks for more than it can do."""


class UnsupportedHead(Worded, UnfitModel):
    """A model whose logits are more than a linear function of its hidden states, and a cap."""

    message = (
        "{0}: its logits differ from those of its hidden states and head by up to {1:.3g}, "
        "which the fused losses do not support: use another model"
    )


class CappedInterpolation(Worded, UnfitModel):
    """Logits with a cap, which no head over the states of two models interpolates."""

    message = (
        "{0} caps its logits at {1:g} but sdpo.teacher is 'trust_region', which interpolates "
        "the scores of one head before any cap: set sdpo.teacher to 'ema', 'live' or 'frozen'"
    )


class UnsupportedRows(Worded, UnfitModel):
    """A model whose states depend on more than what precedes a token in its sequence."""

    message = (
        "{0}: its hidden states change by up to {1:.3g} with later tokens or a "
        "longer sequence in the microbatch, so it cannot be trained: use another model"
    )


class UnsupportedPacking(Worded, UnfitModel):
    """A model in which packed sequences of one row see each other."""

    message = (
        "{0}: hidden states of packed sequences differ from their own by up to {1:.3g}, so "
        "it does not keep the sequences of a row apart: set trainer.packing to false"
    )


class UnsupportedSharing(Worded, UnfitModel):
    """A model that cannot compute what sequences share once."""

    message = "{0}: {1}: set trainer.prefix_sharing to false"


class UndividedContext(Worded, UnfitModel):
    """A model whose attention is not computed from packed rows, by their sequences."""

    message = (
        "{0} cannot have trainer.context_parallel = {1}: some of its layers hand no window "
        "or no arguments to an attention function, or carry a state, or have caps or sinks: "
        "set it to 1"
    )


class NoExperts(Worded, UnfitModel):
    """A model without layers of experts that ranks could divide."""

    message = (
        "trainer.expert_parallel is {1} but {0} has no layers whose experts are one tensor, "
        "which ranks could divide: set it to 1"
    )


class UndividedExperts(UnfitModel):
    """Experts that the ranks cannot divide evenly."""

    def __init__(self, model: str, experts: int, ranks: int) -> None:
        super().__init__(model, experts, ranks)

    def __str__(self) -> str:
        model, experts, ranks = self.args
        fitting = ", ".join(str(one) for one in range(2, experts + 1) if not experts % one)
        return (
            f"trainer.expert_parallel is above 1 but {model} has {experts} experts in a layer, "
            f"which {ranks} ranks cannot divide evenly: set trainer.ranks to one of {fitting}, or "
            "trainer.expert_parallel to 1"
        )


class UnknownLayers(Worded, UnfitModel):
    """A model whose decoder layers cannot be identified."""

    message = (
        "{0} has no list of {1} decoder layers, so it cannot be taken layer by layer: set "
        "trainer.sharding to 'none', and trainer.activation_checkpointing and "
        "trainer.compile to false"
    )


class UnsupportedRouting(Worded, UnfitModel):
    """A mixture whose routers' choices cannot be read or set."""

    message = (
        "{0}: {1}, so its choices of experts can be neither read nor set: set "
        "trainer.moe.router_replay to false and trainer.moe.load_balancing to 0"
    )


class LoraMissing(Worded, UnfitModel):
    """Adapters are configured but peft is not installed."""

    message = (
        "trainer.lora is set but peft is not installed: pip install 'composer-mesh[lora]', "
        "or remove the section"
    )


class LowbitMissing(Worded, UnfitModel):
    """The 8-bit optimizer is configured but torchao is not installed."""

    message = (
        "trainer.optimizer is 'adamw_8bit' but torchao is not installed: pip install "
        "'composer-mesh[lowbit]', or set it to 'adamw'"
    )


class NoSuchLayers(UnfitModel):
    """The configured adapter targets are not suitable layers of the model."""

    def __init__(self, targets: tuple[str, ...], why: str, fitting: tuple[str, ...] = ()) -> None:
        super().__init__(targets, why, fitting)

    def __str__(self) -> str:
        targets, why, fitting = self.args
        if not targets:
            return f"trainer.lora is set but {why}: remove the section"
        names = ", ".join(fitting) or "there are none"
        return (
            f"trainer.lora.targets is {', '.join(targets)} but {why}: name linear layers of the "
            f"model ({names}), or leave it out for all of them"
        )


class ModelNotServed(Worded, UnfitModel):
    """A model whose attention cannot be replaced: its class and the observed difference."""

    message = 'the embedded engine cannot serve {0}: {1}; set generator.engine to "vllm"'
