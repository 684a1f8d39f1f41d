"""The trainer: optimizer, microbatches and ranks.

The losses define what a rank computes; `placement` defines where it runs.

Mixtures of experts in the trainer: precision of routers, balance of experts, router replay.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from composer_mesh.configs.base import (
    MOST_ENTRIES,
    Cores,
    Count,
    CountOrZero,
    CustomFunction,
    NotNegative,
    Positive,
    Processes,
    Section,
    Share,
    Tokens,
)
from composer_mesh.configs.channels import Decay


class MoeConfig(Section):
    """How a mixture of experts is trained; these keys have no effect on dense models."""

    router_float32: bool = True
    """Whether routers compute their logits in float32 where the rest is in bfloat16, in the trainer
    and in the embedded engine."""

    load_balancing: NotNegative = 0.0
    """Weight of the auxiliary loss that spreads tokens over experts. Each layer in which all are
    equally busy adds 1 to that loss."""

    router_replay: bool = False
    """Whether the policy loss is computed with the experts that the engine chose when it sampled.
    They are sent with the rollouts: a byte for each layer and expert of a token."""

    compare_every: CountOrZero = 0
    """Steps between measurements of the mismatch without router replay, each a forward over the
    step's rollouts; 0 for none."""


Sharing = Literal["off", "levels", "row"]
"""How common prefixes of sequences are computed once: not at all, one forward for each level of a
tree of prefixes, or the whole tree as one row."""

OptimizerName = Literal["adamw", "adamw_8bit", "muon"]

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraConfig(Section):
    """Low-rank adapters, which are trained instead of the model's own weights."""

    rank: Annotated[int, Field(ge=1, le=100_000)] = 16
    """Rank of each adapter."""

    alpha: Positive = 32.0
    """Scale of the adapters: their product is multiplied by alpha / rank."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability of an adapter's inputs in training."""

    targets: (
        Annotated[tuple[str, ...], Field(strict=False, min_length=1, max_length=MOST_ENTRIES)]
        | None
    ) = None
    """Names of the linear layers that get an adapter; all of the decoder's without it."""

    sync: Literal["merged", "adapters"] = "merged"
    """What generators get at each version: all weights with the adapters merged into them, or only
    the adapters. Engines then compute them next to their own weights."""


class TrainerConfig(Section):
    """Optimizer, precision, sharding and checkpoints of the trainer."""

    lr: Positive = 3e-4
    """Peak learning rate."""

    lr_schedule: Decay = "constant"
    """Decay of the learning rate from its peak to the end of the run."""

    warmup_steps: CountOrZero = 0
    """Steps over which the learning rate rises from 0 to its peak."""

    min_lr_ratio: Share = 0.0
    """Final learning rate as a share of the peak."""

    optimizer: OptimizerName = "adamw"
    """"adamw"; "adamw_8bit": from torchao, with both moments of large weights in 8 bits; "muon":
    for the matrices of the decoder's layers, with AdamW for all others."""

    optimizer_offload: bool = False
    """Whether the optimizer's state is in the host's memory between updates, and on a GPU only for
    the weights that are being updated."""

    weight_decay: NotNegative = 0.0
    """Decoupled weight decay of the optimizer."""

    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's decay of the gradient mean."""

    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW's decay of the gradient's second moment."""

    grad_clip: Positive = 1.0
    """Maximum gradient norm of a step."""

    microbatch_tokens: Tokens = 4096
    """Tokens, including padding, of one forward and backward pass."""

    updates_per_batch: Count = 1
    """Optimizer updates that a step's batch is divided into, by prompt groups. From the second one
    on, ratios to the log-probs of the step's start differ from 1, and clips bind."""

    epochs: Count = 1
    """Times that a step trains on its batch, each time with all of its updates."""

    update_share_every: CountOrZero = 0
    """Steps between measurements of each channel's share of the gradient, for which every channel
    has a separate backward. With 0 it is measured only where a share is bounded."""

    packing: bool = False
    """Whether several sequences share a row of a microbatch, which reduces padding."""

    prefix_sharing: bool = False
    """Whether common prefixes of a microbatch's sequences, such as the prompt of a group, are
    computed once. For models of full attention and of windows, with attention "sdpa" or "flex"."""

    attention: Literal["sdpa", "flex", "flash", "eager"] = "sdpa"
    """Attention implementation. "sdpa": torch's kernels; "flex": its compiled ones, on a GPU;
    "flash": those of the package flash-attn, on a GPU; "eager": all scores at once. "eager" takes
    much memory, but supports the caps of Gemma 2 and the sinks of gpt-oss everywhere."""

    sharding: Literal["auto", "none", "fsdp2"] = "auto"
    """"none": complete copies on every rank; "fsdp2": each rank holds rows of every weight; "auto":
    fsdp2 for several ranks or a compute_dtype other than float32."""

    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of forward and backward; weights, sums and optimizer state stay float32."""

    frozen_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which frozen copies are kept, and compute if they are not sharded. They are the
    reference, and SDPO teachers other than an average."""

    activation_checkpointing: bool | Literal["auto"] = "auto"
    """Whether a layer's activations are recomputed in the backward pass instead of stored. "auto"
    recomputes them if the run would not fit its hosts otherwise; `check` prints it."""

    activation_offload: bool = False
    """Whether the inputs of checkpointed layers wait for the backward in the host's memory."""

    compile: bool = False
    """Whether torch.compile is applied to each layer, which needs a C++ compiler on a CPU."""

    lora: LoraConfig | None = None
    """Train adapters instead of the model's own weights."""

    moe: MoeConfig = MoeConfig()
    """Mixtures of experts: precision of routers, balance of experts, router replay."""

    backend: CustomFunction | None = None
    """Your own class that loads the model and makes its optimizers, instead of AdamW."""

    checkpoint_every: CountOrZero = 10
    """Steps between checkpoints for restarts; 0 keeps only the last one."""

    checkpoints_kept: Count = 2
    """Number of newest checkpoints to keep, in addition to the one of the run's end."""

    checkpoint_keep_every: CountOrZero = 0
    """Keep checkpoints of multiples of this step count permanently; 0 keeps only the newest."""

    checkpoint_export: bool = True
    """Whether every checkpoint is also a model folder, which transformers and vLLM load; the last
    one of a run always is."""

    ranks: Processes = 1
    """Number of trainer processes that share each step's samples and sum their gradients."""

    context_parallel: Processes = 1
    """Number of ranks that divide the positions of each microbatch among them. Before attention
    they exchange positions for heads, so each rank keeps a part of a long context's activations."""

    expert_parallel: Processes = 1
    """Number of ranks that divide the experts of each layer of a mixture among them. Tokens are
    sent to the ranks of their experts, in place of all experts' weights to every rank."""

    threads: Cores = 1
    """CPU threads of each trainer process."""

    @property
    def checkpoints_layers(self) -> bool:
        """Whether activations are recomputed; not yet where "auto" awaits the placement."""
        return self.activation_checkpointing is True

    @property
    def updates(self) -> int:
        """Optimizer updates of a step."""
        return self.updates_per_batch * self.epochs

    @property
    def sharded(self) -> bool:
        """Whether weights, gradients and optimizer state are sharded over the ranks."""
        if self.sharding == "auto":
            return self.ranks > 1 or self.compute_dtype != "float32"
        return self.sharding == "fsdp2"

    @property
    def shares_base(self) -> bool:
        """Whether the policy that a run began with is the trained model without its adapters.

        Of sharded weights it is not: a forward of the base would release what a backward awaits.
        """
        return self.lora is not None and not self.sharded and self.backend is None

    @property
    def sharing(self) -> Sharing:
        """How shared prefixes are computed: the kernels of flex skip what a row's mask hides."""
        if not self.prefix_sharing:
            return "off"
        return "row" if self.attention == "flex" else "levels"

    def _problems(self) -> Iterator[str]:
        if self.prefix_sharing and self.attention in ("flash", "eager"):
            why = (
                "takes no mask of a tree" if self.attention == "flash" else "stores all its scores"
            )
            yield (
                f"prefix_sharing is true but attention is {self.attention!r}, which {why}: set "
                "attention to 'sdpa', on a GPU to 'flex', or prefix_sharing to false"
            )
        if self.compile and self.sharing == "levels":
            yield (
                "prefix_sharing and compile are true but attention is 'sdpa', where every layer "
                "would be compiled several times, once for each kind of level: set compile or "
                "prefix_sharing to false, or on a GPU attention to 'flex'"
            )
        yield from self._division_problems()
        if self.compute_dtype != "float32" and not self.sharded:
            yield (
                f"compute_dtype is {self.compute_dtype!r} but sharding is 'none', which keeps no "
                "float32 weights next to those it computes with: set sharding to 'auto'"
            )
        if self.attention == "flash" and self.compute_dtype == "float32":
            yield (
                "attention is 'flash' but compute_dtype is 'float32', which flash-attn does not "
                "know: set compute_dtype to 'bfloat16' or attention to 'sdpa'"
            )
        if self.activation_offload and not self.checkpoints_layers:
            found = "'auto'" if self.activation_checkpointing else "false"
            yield (
                f"activation_offload is true but activation_checkpointing is {found}, and only "
                "inputs of checkpointed layers are offloaded: set activation_checkpointing to true"
            )
        if self.min_lr_ratio and self.lr_schedule == "constant":
            yield (
                f"min_lr_ratio is {self.min_lr_ratio} but lr_schedule is 'constant', which never "
                "falls: set lr_schedule to 'linear' or 'cosine'"
            )

    def _division_problems(self) -> Iterator[str]:
        """Yield what cannot be divided among ranks, and routers that would not be reached."""
        positions = (
            "positions are divided only of packed rows under sdpa, without shared prefixes or "
            "compiled layers"
        )
        sharding = "fsdp2" if self.sharded else "none"
        experts = "experts are divided only of sharded weights, in layers that are not compiled"
        for key, why, name, found, needed in (
            ("context_parallel", positions, "packing", self.packing, True),
            ("context_parallel", positions, "attention", self.attention, "sdpa"),
            ("context_parallel", positions, "prefix_sharing", self.prefix_sharing, False),
            ("context_parallel", positions, "compile", self.compile, False),
            ("expert_parallel", experts, "sharding", sharding, "fsdp2"),
            ("expert_parallel", experts, "compile", self.compile, False),
        ):
            size = getattr(self, key)
            if self.ranks % size:
                yield (
                    f"{key} is {size} but ranks is {self.ranks}, which it does not divide: set "
                    f"ranks to a multiple of {size}, or {key} to a divisor of ranks"
                )
            if size > 1 and found != needed:
                yield (
                    f"{key} is {size} but {name} is {found!r}, and {why}: set {name} to "
                    f"{needed!r}, or {key} to 1"
                )
        chosen = [name for name in ("router_replay", "load_balancing") if getattr(self.moe, name)]
        for other in ("prefix_sharing", "compile"):
            if chosen and getattr(self, other):
                yield (
                    f"moe.{chosen[0]} is {getattr(self.moe, chosen[0])} but {other} is true, where "
                    f"routers are not reached: set {other} to false, or moe.{chosen[0]} to its "
                    "default"
                )
