"""The SDPO channel: self-distillation from the same model with a hint at its error sites."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from composer_mesh.configs.base import (
    Concurrent,
    Cores,
    NotNegative,
    Positive,
    Processes,
    Section,
    Share,
)
from composer_mesh.configs.hints import HintsConfig


class SdpoConfig(Section):
    """Self-distillation from the same model with a hint at its error sites."""

    alpha: NotNegative = 0.0
    """Weight of the SDPO loss in the total; 0 turns the channel off."""

    objective: Literal["none", "taid", "entropy_opd"] = "none"
    """"none": the generalized JSD; "taid": a target that moves from student to teacher over the
    run; "entropy_opd": forward KL where the teacher's entropy is high, else reverse KL."""

    jsd_beta: Share = 0.5
    """Mixture weight of the generalized Jensen-Shannon divergence."""

    temperature: Positive = 1.0
    """Temperature of both distributions in the divergence."""

    entropy_opd_h_max: Positive | None = None
    """Teacher entropy in nats from which on entropy_opd is forward KL; log of the vocabulary size
    when not set."""

    teacher_output: Literal["hidden", "topk", "full", "sampled"] = "hidden"
    """Teacher output per token. "hidden": the last hidden state, exact and small; "topk": log-probs
    of top_k entries; "full": all logits; "sampled": the log-prob of the sampled token."""

    top_k: Annotated[int, Field(ge=1, le=100_000)] = 100
    """Number of entries per token in a topk output; the rest is one tail bucket."""

    top_k_choice: Literal["teacher", "student"] = "teacher"
    """Model whose most likely entries a topk output holds. "student" queries again after the
    student's forward."""

    teacher: Literal["live", "ema", "frozen", "trust_region"] = "live"
    """Weights of the teacher. "live": the trainer's; "ema": their moving average; "frozen": the
    initial ones; "trust_region": interpolated logits of the initial and the trainer's weights."""

    ema_rate: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Step of the ema towards the trainer's weights at each version; for trust_region, the
    interpolation factor from the initial logits to the trainer's."""

    placement: Literal["mesh", "inline"] = "mesh"
    """"mesh": teachers have their own processes; "inline": the trainer runs their forward."""

    replicas: Processes = 1
    """Number of SDPO teacher actors that share the tokens of a step."""

    when_lost: Literal["skip", "wait"] = "skip"
    """Behaviour of a step when a teacher dies: "skip" trains it without the channel, "wait" waits
    for the replacement."""

    max_sites_per_step: Concurrent = 32
    """Maximum number of error sites shown to the teacher per optimizer step."""

    threads: Cores = 1
    """CPU threads of each SDPO teacher."""

    hints: HintsConfig = Field(default_factory=HintsConfig)
    """Hints that are shown to the teacher."""

    @model_validator(mode="after")
    def _teacher_output_fits_the_loss(self) -> Self:
        if self.objective != "none" and self.teacher_output not in ("hidden", "full"):
            raise ValueError(
                f"objective is {self.objective!r} but teacher_output is {self.teacher_output!r}, "
                "and it needs the teacher's whole distribution: "
                "set teacher_output to 'hidden' or 'full'"
            )
        if self.entropy_opd_h_max is not None and self.objective != "entropy_opd":
            raise ValueError(
                f"entropy_opd_h_max is {self.entropy_opd_h_max} but objective is "
                f"{self.objective!r}, which does not read it: "
                "remove it or set objective to 'entropy_opd'"
            )
        if self.placement == "inline" and self.replicas > 1:
            raise ValueError(
                f"replicas is {self.replicas} but placement is 'inline', where the trainer is its "
                "own teacher: set placement to 'mesh' or replicas to 1"
            )
        return self

    @property
    def on(self) -> bool:
        """Whether the channel is active in the run."""
        return self.alpha > 0

    @property
    def has_own_actors(self) -> bool:
        """Whether teachers run in their own processes."""
        return self.on and self.placement == "mesh"
