"""The trainer: its optimizer, the size of its microbatches, and the ranks that share them.

What a rank computes is decided by the losses; where it runs, by the placement.
"""

from typing import Annotated, Literal

from pydantic import Field

from composer_mesh.configs.base import Count, NotNegative, Positive, Section


class TrainerConfig(Section):
    """The optimizer and the size of its microbatches."""

    lr: Positive = 3e-4
    """Peak learning rate."""

    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls from its peak to the end of the run."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises from 0 to its peak."""

    weight_decay: NotNegative = 0.0
    """AdamW's decoupled weight decay."""

    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's decay of the gradient mean."""

    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW's decay of the gradient's second moment."""

    grad_clip: Positive = 1.0
    """Largest gradient norm of a step."""

    microbatch_tokens: Count = 4096
    """Tokens, padding included, that one forward and backward pass holds."""

    checkpoint_every: Annotated[int, Field(ge=0)] = 10
    """Steps between checkpoints that a restart begins again from; 0 keeps only the last one."""

    ranks: Count = 1
    """Trainer processes that share each step's samples and sum their gradients."""

    threads: Count = 1
    """CPU threads of each trainer process."""
