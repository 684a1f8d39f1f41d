"""The SDPO channel: the same model, shown a hint at its error sites, teaches the student.

What hints are is `hints`; this is the teacher, its output, and the loss.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from composer_mesh.configs.base import Count, NotNegative, Positive, Section, Share
from composer_mesh.configs.hints import HintsConfig


class SdpoConfig(Section):
    """The self-distillation channel: the same model, shown a hint at its error sites."""

    alpha: NotNegative = 0.0
    """Weight of the SDPO loss in the total; 0 turns the channel off."""

    objective: Literal["none", "taid", "entropy_opd"] = "none"
    """"none": the generalized JSD; "taid": towards a target that moves from student to teacher
    over the run; "entropy_opd": forward KL where the teacher is unsure, else reverse KL."""

    jsd_beta: Share = 0.5
    """Mixture weight of the generalized Jensen-Shannon divergence."""

    temperature: Positive = 1.0
    """Temperature of both distributions in the divergence."""

    entropy_opd_h_max: Positive | None = None
    """Teacher entropy in nats from which on entropy_opd is forward KL; log of the vocabulary where
    not set."""

    teacher_output: Literal["hidden", "topk", "full", "sampled"] = "hidden"
    """What the teacher tells of each token. "hidden": its last hidden state, exact and small;
    "topk": its log-probs of top_k entries; "full": all logits; "sampled": the sampled token's."""

    top_k: Count = 100
    """Entries of each token that a topk output holds; the rest is one tail bucket."""

    top_k_choice: Literal["teacher", "student"] = "teacher"
    """Whose most likely entries a topk output holds. "student" asks again after its forward."""

    teacher: Literal["live", "ema", "frozen", "trust_region"] = "live"
    """Weights of the teacher. "live": the trainer's; "ema": their moving average; "frozen": the
    initial ones; "trust_region": logits between the initial ones' and the trainer's."""

    ema_rate: Annotated[float, Field(gt=0, le=1)] = 0.05
    """How far ema moves to the trainer's weights at each version, and how far trust_region's
    logits lie from the initial ones' to the trainer's."""

    placement: Literal["mesh", "inline"] = "mesh"
    """"mesh": teachers have processes of their own; "inline": the trainer runs their forward."""

    replicas: Count = 1
    """SDPO teacher actors that share the tokens of a step."""

    when_lost: Literal["skip", "wait"] = "skip"
    """What a step does when a teacher dies: "skip" trains it without the channel, "wait" lets it
    wait for the replacement."""

    max_sites_per_step: Count = 32
    """Error sites that the teacher sees in one optimizer step."""

    threads: Count = 1
    """CPU threads of each SDPO teacher."""

    hints: HintsConfig = Field(default_factory=HintsConfig)
    """What the teacher is shown."""

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
        """Whether the channel takes part in the run."""
        return self.alpha > 0

    @property
    def has_own_actors(self) -> bool:
        """Whether teachers live in processes of their own."""
        return self.on and self.placement == "mesh"
