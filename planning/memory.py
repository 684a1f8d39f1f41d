"""Memory needs of a process as sums of named parts, computed from a model's sizes.

Weights, gradients, optimizer state, caches and buffers are counted exactly. Temporaries are bounded
by the widest layer and the tokens of one pass; the base memory of a process was measured on Linux
with torch 2.13 (`docs/placement.md` has the figures). Pure arithmetic that reads no config.

Symbols: P parameters, R trainer ranks, T tokens of one pass, H hidden size, V vocabulary.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from composer_mesh.configs.policy import ModelSizes
from composer_mesh.configs.trainer import OptimizerName
from composer_mesh.planning.model_sizes import (
    cache_numbers,
    embedding_parameters,
    expert_parameters,
    inner_width,
    key_width,
    layer_parameters,
    parameter_count,
    query_width,
)
from composer_mesh.planning.optimizer_memory import (
    OptimizerMemory,
    adapter_memory,
    optimizer_memory,
)

MB, GB = 2**20, 2**30
FLOAT, HALF = 4, 2
"""Bytes of a number in float32 and in bfloat16."""

LIGHT_PROCESS = 90 * MB
"""An actor that imports Monarch but not torch."""
MODEL_PROCESS = 350 * MB
"""An actor that imports torch and transformers, before it loads a model."""
VLLM_PROCESS = 650 * MB
"""An actor that imports vLLM, before it loads a model."""
CONTROLLER = 480 * MB
"""The process that runs the command."""
SHARED_CODE = 200 * MB
"""Libraries that all processes of a host share; counted once per host."""
CUDA_PROCESS = 3 * GB
"""Host memory of a process that uses a GPU: CUDA's libraries, pinned buffers. An estimate."""
CUDA_CONTEXT = 3 * GB // 2
"""GPU memory of a process next to its tensors; 1.3 to 1.5 GB on an H100 (`docs/gpu.md`)."""
SLACK = 0.25
"""Memory that an allocator holds beyond temporaries, as a fraction of them."""
SCORE_BYTES = 16
"""Bytes per logit while sampling: the logit, its log-prob, their sum in double precision."""

# Rows of logits that the fused losses hold at once, in float32, with their gradients and a copy:
# `losses.blocks` has 2**22 numbers on the CPU and 2**26 on an accelerator.
SCORES_CPU, SCORES_GPU = 3 * FLOAT * 2**22, 3 * FLOAT * 2**26


@dataclass(frozen=True)
class MemoryTerm:
    """One term of a sum."""

    what: str
    bytes: int


Parts = tuple[MemoryTerm, ...]


def total(parts: Iterable[MemoryTerm]) -> int:
    """Return the total bytes of all parts."""
    return sum(part.bytes for part in parts)


def in_gb(count: float) -> str:
    """Format bytes in GB for a table: `0.35`, `24.0`, `131`."""
    value = count / GB
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def in_words(parts: Iterable[MemoryTerm]) -> str:
    """Format a sum: `weights 1.84 + KV cache 0.75 = 2.59 GB`."""
    parts = list(parts)
    listed = [part for part in parts if part.bytes >= GB // 100]
    if rest := total(parts) - total(listed):
        listed.append(MemoryTerm("others", rest))
    terms = " + ".join(f"{part.what} {in_gb(part.bytes)}" for part in listed)
    return f"{terms} = {in_gb(total(listed))} GB"


@dataclass(frozen=True)
class RankTraining:
    """How one trainer rank computes.

    `sharded`: each of the `ranks` stores only its shard; `tokens`: those of a pass that this rank
    computes; `number`: bytes of a number in the forward pass; `trainable`: number of parameters
    with optimizer state; `frozen_bytes`: bytes of a parameter in all frozen copies; `longest`:
    longest row if attention needs a mask, else 0; `scored`: whether attention makes all its scores
    at once; `offloaded`: whether the inputs of checkpointed layers wait in host memory;
    `optimizer_offload`: whether its state does; `context`: ranks that divide the positions;
    `experts_over`: ranks that divide a layer's experts; `gradients`: sets
    of them, one for each channel where shares of an update are measured; `optimizers`: those that
    have all trained weights.
    """

    ranks: int
    tokens: int
    trainable: int
    number: int = FLOAT
    sharded: bool = True
    checkpointing: bool = False
    offloaded: bool = False
    frozen_bytes: int = 0
    longest: int = 0
    scored: bool = False
    on_gpu: bool = False
    optimizer: OptimizerName = "adamw"
    optimizer_offload: bool = False
    context: int = 1
    experts_over: int = 1
    gradients: int = 1
    optimizers: int = 1


def optimizer_of(sizes: ModelSizes, how: RankTraining) -> OptimizerMemory:
    """Return the memory of one rank's optimizers, which update one after another."""
    shards = how.ranks if how.sharded else 1
    if how.trainable != parameter_count(sizes):
        one = adapter_memory(how.trainable // shards)
    else:
        one = optimizer_memory(
            sizes, how.optimizer, shards, how.optimizer_offload, how.on_gpu, how.sharded
        )
    return replace(one, state=how.optimizers * one.state, offloaded=how.optimizers * one.offloaded)


def training_parts(sizes: ModelSizes, how: RankTraining) -> Parts:
    """Return the memory of one trainer rank in a step, on its compute device."""
    shards = how.ranks if how.sharded else 1
    optimizer = optimizer_of(sizes, how)
    passing = (
        MemoryTerm("gathered for compute", _gathered(sizes, how)),
        MemoryTerm("gradient of the head", _head_gradient(sizes, how)),
        MemoryTerm("experts of this rank", _own_experts(sizes, how)),
        MemoryTerm("activations", _passing(sizes, how)),
        # As it is built, and once more in the dtype of the scores, which the kernels add it to.
        MemoryTerm("attention mask", (1 + how.number) * how.tokens * how.longest),
        MemoryTerm("attention scores", _attention_scores(sizes, how)),
        MemoryTerm("blocks of scores", SCORES_GPU if how.on_gpu else SCORES_CPU),
        MemoryTerm("allocator's slack", int(SLACK * _passing(sizes, how))),
    )
    visiting = optimizer.visiting if how.optimizer_offload else 0
    updating = (
        MemoryTerm("optimizer state on the device", visiting),
        MemoryTerm("update of the weights", optimizer.update),
        MemoryTerm("allocator's slack", int(SLACK * optimizer.update)),
    )
    return (
        MemoryTerm("master weights", FLOAT * parameter_count(sizes) // shards),
        MemoryTerm("gradients", how.gradients * FLOAT * how.trainable // shards),
        MemoryTerm("optimizer state", 0 if how.optimizer_offload else optimizer.state),
        MemoryTerm("frozen copies", how.frozen_bytes * parameter_count(sizes) // shards),
        *max(passing, updating, key=total),  # the weights are updated when passes have ended
    )


def activation_bytes(sizes: ModelSizes, number: int) -> int:
    """Return the activation bytes that autograd stores per token and layer, without scores.

    Counted on transformers' decoders with its fused attention. Norms compute in float32 even where
    the rest is in bfloat16.
    """
    norms_of_heads = sizes.norms_heads
    inner = inner_width(sizes)
    if sizes.model_type == "gpt_oss":
        # Gates are clamped, experts read a token without a copy, norms multiply in float32, and
        # eager attention repeats keys and values.
        routed = number * 2 * sizes.num_experts_per_tok * sizes.hidden_size
        attention = number * 4 * query_width(sizes)
        widths = (24 if number == FLOAT else 20) * sizes.hidden_size + number * 7 * inner
        return widths + routed + attention
    # Each expert of a token gets its input and gives its output.
    routed = 4 * sizes.num_experts_per_tok * sizes.hidden_size
    heads = query_width(sizes) + key_width(sizes)
    if number == FLOAT:
        widths = 6 * sizes.hidden_size + 4 * inner + routed
        return FLOAT * (widths + (4 if norms_of_heads else 2) * heads)
    widths = 16 * sizes.hidden_size + 8 * inner + 2 * routed
    return widths + (10 if norms_of_heads else 4) * heads


def _passing(sizes: ModelSizes, how: RankTraining) -> int:
    """Return the bytes stored for a backward: each layer's activations, or only its inputs."""
    layer, layers = activation_bytes(sizes, how.number), sizes.num_hidden_layers
    layer += _exchanged(sizes, how)
    kept = offloaded_bytes(sizes, how.number) if how.checkpointing else (layers - 1) * layer
    if how.offloaded:
        kept = 0
    # The layer whose backward runs has its gradients next to its activations.
    return how.tokens * (kept + 2 * layer + 3 * FLOAT * sizes.hidden_size)


def _exchanged(sizes: ModelSizes, how: RankTraining) -> int:
    """Return what dividing positions and experts adds to a token's activations in a layer.

    Keys and values are repeated where there are fewer heads than ranks; what experts compute is
    stored where they are, and where it is weighted.
    """
    repeats = max(1, how.context // sizes.num_key_value_heads)
    found = 2 * how.number * key_width(sizes) * (repeats - 1)
    if how.experts_over > 1:
        found += how.number * sizes.num_experts_per_tok * sizes.hidden_size
    return found


def offloaded_bytes(sizes: ModelSizes, number: int) -> int:
    """Return the bytes of a token's inputs to all layers."""
    return sizes.num_hidden_layers * sizes.hidden_size * number


def _attention_scores(sizes: ModelSizes, how: RankTraining) -> int:
    """Return the bytes of attention's scores that a backward needs, and of one layer's gradients.

    Stored are the caps' output, the float32 softmax, and its copy in the dtype of compute.
    """
    if not how.scored:
        return 0
    scores = sizes.num_attention_heads * how.tokens * how.longest
    stored = scores * (2 * FLOAT if how.number == FLOAT else FLOAT + 2 * how.number)
    layers = 1 if how.checkpointing else sizes.num_hidden_layers
    return stored * layers + 2 * FLOAT * scores


def _gathered(sizes: ModelSizes, how: RankTraining) -> int:
    """Return the bytes of unsharded weights and gradients of two layers, embedding and head."""
    if how.number == FLOAT and (how.ranks == 1 or not how.sharded):
        return 0
    layer = layer_parameters(sizes)
    if how.experts_over > 1:
        layer -= expert_parameters(sizes)
    return 2 * how.number * (embedding_parameters(sizes) + 2 * layer)


def _head_gradient(sizes: ModelSizes, how: RankTraining) -> int:
    """Return the bytes of the head's gradient before it is added to others; gathered if sharded."""
    trained = how.trainable == parameter_count(sizes)
    whole = how.number == FLOAT and (how.ranks == 1 or not how.sharded)
    return FLOAT * sizes.vocab_size * sizes.hidden_size * (trained and whole)


def _own_experts(sizes: ModelSizes, how: RankTraining) -> int:
    """Return the bytes of the experts that a rank computes besides its rows, and their gradients.

    Each layer's are kept for the backward unless it is checkpointed; in float32, and stored by this
    rank alone, they are the weights themselves. A gradient also has a float32 form, which is added.
    """
    if how.experts_over == 1:
        return 0
    of_layer = expert_parameters(sizes) // how.experts_over
    copied = how.number != FLOAT or how.experts_over < how.ranks
    layers = 1 if how.checkpointing else sizes.num_hidden_layers
    return of_layer * (how.number * (layers * copied + 1) + FLOAT * copied)


def weight_parts(sizes: ModelSizes, number: int, copies: int = 1, split: int = 1) -> Parts:
    """Return read-only weights: `copies` of them, each split over `split` devices."""
    return (MemoryTerm("weights", copies * number * parameter_count(sizes) // split),)


def forward_parts(sizes: ModelSizes, number: int, tokens: int, on_gpu: bool) -> Parts:
    """Return the temporaries of a forward without gradients over this many tokens."""
    widest = 3 * (sizes.hidden_size + inner_width(sizes))
    widest += 2 * sizes.num_experts_per_tok * sizes.hidden_size
    working = number * tokens * widest
    scores = SCORES_GPU if on_gpu else SCORES_CPU
    return (
        MemoryTerm("forward", working + scores),
        MemoryTerm("allocator's slack", int(SLACK * (working + scores))),
    )


def cache_bytes(sizes: ModelSizes, number: int, rows: int, context: int, split: int = 1) -> int:
    """Return the KV-cache bytes of `rows` conversations, on each of `split` devices."""
    return number * cache_numbers(sizes) * rows * context // split
