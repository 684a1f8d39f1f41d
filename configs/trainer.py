"""The trainer: its optimizer, the size of its microbatches, and the ranks that share them.

What a rank computes is decided by the losses; where it runs, by the placement.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from composer_mesh.configs.base import Count, NotNegative, Positive, Section, Share

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraConfig(Section):
    """Low-rank adapters, which train in place of the model's own weights."""

    rank: Count = 16
    """Rank of each adapter."""

    alpha: Positive = 32.0
    """Scale of the adapters: their product counts alpha / rank."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that training leaves out."""

    targets: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = PROJECTIONS
    """Names of the linear layers that get an adapter."""


class TrainerConfig(Section):
    """The optimizer and the size of its microbatches."""

    lr: Positive = 3e-4
    """Peak learning rate."""

    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls from its peak to the end of the run."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises from 0 to its peak."""

    min_lr_ratio: Share = 0.0
    """Share of the peak that a falling learning rate ends at."""

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

    packing: bool = False
    """Whether several sequences share a row of a microbatch, so that less of it is padding."""

    attention: Literal["sdpa", "flex", "flash"] = "sdpa"
    """What computes attention: torch's kernels, or on a GPU its compiled ones ("flex") or those of
    the package flash-attn ("flash")."""

    sharding: Literal["auto", "none", "fsdp2"] = "auto"
    """"none": whole copies on every rank; "fsdp2": each rank keeps rows of every weight; "auto":
    fsdp2 where ranks are several or compute_dtype is not float32."""

    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """What forward and backward compute in; weights, sums and optimizer stay float32."""

    activation_checkpointing: bool = False
    """Whether a layer's activations are computed again in the backward pass and not kept."""

    compile: bool = False
    """Whether torch.compile is applied to each layer, which needs a C++ compiler on a CPU."""

    lora: LoraConfig | None = None
    """Train adapters and not the model's own weights."""

    checkpoint_every: Annotated[int, Field(ge=0)] = 10
    """Steps between checkpoints that a restart begins again from; 0 keeps only the last one."""

    checkpoints_kept: Count = 2
    """Newest checkpoints that are kept; the one of the run's end is kept beside them."""

    checkpoint_keep_every: Annotated[int, Field(ge=0)] = 0
    """Steps whose multiples keep their checkpoints for good; 0 keeps none but the newest."""

    checkpoint_export: bool = True
    """Whether every checkpoint is a model folder too, which transformers and vLLM load; the last
    one of a run is in any case."""

    ranks: Count = 1
    """Trainer processes that share each step's samples and sum their gradients."""

    threads: Count = 1
    """CPU threads of each trainer process."""

    @property
    def sharded(self) -> bool:
        """Whether weights, gradients and optimizer are spread over the ranks."""
        if self.sharding == "auto":
            return self.ranks > 1 or self.compute_dtype != "float32"
        return self.sharding == "fsdp2"

    @model_validator(mode="after")
    def _precision_is_possible(self) -> Self:
        if self.compute_dtype != "float32" and not self.sharded:
            raise ValueError(
                f"compute_dtype is {self.compute_dtype!r} but sharding is 'none', which keeps no "
                "float32 weights beside those it computes with: set sharding to 'auto'"
            )
        if self.attention == "flash" and self.compute_dtype == "float32":
            raise ValueError(
                "attention is 'flash' but compute_dtype is 'float32', which flash-attn does not "
                "know: set compute_dtype to 'bfloat16' or attention to 'sdpa'"
            )
        return self

    @model_validator(mode="after")
    def _rate_falls_only_with_a_schedule(self) -> Self:
        if self.min_lr_ratio and self.lr_schedule == "constant":
            raise ValueError(
                f"min_lr_ratio is {self.min_lr_ratio} but lr_schedule is 'constant', which never "
                "falls: set lr_schedule to 'linear' or 'cosine'"
            )
        return self
