"""Optimizer state: which of it has 8 bits, how offloading divides it, and the bytes of both.

The trainer follows the same rules, so that the sums are those of what it allocates.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from composer_mesh.configs.policy import ModelSizes
from composer_mesh.configs.trainer import OptimizerName
from composer_mesh.planning.model_sizes import decoder_weights

FLOAT = 4
LARGEST_BLOCK, SMALLEST_BLOCK = 256, 64
"""Values that share a scale: as many as divide a row of the weight, but no fewer than 64."""
FEWEST_QUANTIZED = 4096
"""Weights with fewer values keep their state in float32, as in torchao and bitsandbytes."""
PART_VALUES = 2**25
"""Values of the weights whose offloaded state is on the device at once, unless one has more."""
UPDATED_VALUES = 2**20
"""Values of a weight with 8-bit state that are updated at once, unless updates are compiled."""

# Bytes of temporaries in an update, for each of its values; measured with torch 2.13.
EACH, TOGETHER = 8, 4
"""Of AdamW on a CPU, weight after weight, and on a GPU, all weights together."""
QUANTIZING = 53
"""Of AdamW with 8-bit state, whose codes are found as int64."""
ORTHOGONALIZING = 13
"""Of Muon, for a square matrix: 12, and 1 for buffers of its products."""
OWNING = 26
"""Of Muon of sharded rows, for the whole matrix that a rank owns in a round: what arrives, what is
computed of it, what leaves, and this rank's rows of the other matrices of the round: 24, and 2 that
the exchange may hold for a moment after it."""


def block_size(shape: Sequence[int]) -> int:
    """Return how many values of a weight's 8-bit state share a scale; 0 for state in float32.

    Blocks do not cross rows, so that they are the same however the rows are divided among ranks.
    """
    if len(shape) < 2 or math.prod(shape) < FEWEST_QUANTIZED:
        return 0
    found = math.gcd(math.prod(shape[1:]), LARGEST_BLOCK)
    return found if found >= SMALLEST_BLOCK else 0


def is_layer_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a weight is a matrix of a numbered layer, unlike embeddings, heads and experts."""
    return len(shape) == 2 and any(part.isdecimal() for part in name.split("."))


def state_tensors(optimizer: OptimizerName, name: str, shape: Sequence[int]) -> list[int]:
    """Return the bytes of each tensor of a weight's optimizer state."""
    values = math.prod(shape)
    if optimizer == "muon" and is_layer_matrix(name, shape):
        return [FLOAT * values]
    block = block_size(shape) if optimizer == "adamw_8bit" else 0
    return 2 * ([values, FLOAT * values // block] if block else [FLOAT * values])


def state_bytes(optimizer: OptimizerName, name: str, shape: Sequence[int]) -> int:
    """Return the bytes of a weight's optimizer state."""
    return sum(state_tensors(optimizer, name, shape))


def parts_of(values: Sequence[int]) -> list[list[int]]:
    """Divide weights, given by their counts of values, into parts; return their positions."""
    parts: list[list[int]] = []
    held = 0
    for at, count in enumerate(values):
        if not parts or held + count > PART_VALUES:
            parts.append([])
            held = 0
        parts[-1].append(at)
        held += count
    return parts


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes of an optimizer on one rank.

    `state`: all of it; `offloaded`: of the host's memory, if it is offloaded; `visiting`: the most
    of it that is then on the device at once; `update`: temporaries of an update.
    """

    state: int
    offloaded: int
    visiting: int
    update: int


@lru_cache(maxsize=64)
def optimizer_memory(
    sizes: ModelSizes,
    optimizer: OptimizerName,
    shards: int,
    offloaded: bool,
    on_gpu: bool,
    sharded: bool = True,
) -> OptimizerMemory:
    """Return the bytes of an optimizer of all weights, each divided into as many shards.

    Weights that are not `sharded` are plain tensors.

    torch's allocator of pinned memory rounds each tensor up to a power of two.
    """
    weights = list(decoder_weights(sizes, trained=True))
    counts = [math.prod(shape) // shards for _, shape in weights]
    states = [state_bytes(optimizer, *weight) for weight in weights]
    parts = parts_of(counts) if offloaded else [list(range(len(weights)))]
    held = sorted(sum(states[at] for at in part) for part in parts)
    update = max(
        _update_bytes(optimizer, [(*weights[at], counts[at]) for at in part], on_gpu, sharded)
        for part in parts
    )
    tensors = [one // shards for weight in weights for one in state_tensors(optimizer, *weight)]
    pinned = sum(1 << max(0, one - 1).bit_length() for one in tensors)
    state = sum(states) // shards
    return OptimizerMemory(state, pinned if on_gpu else state, sum(held[-2:]) // shards, update)


def adapter_memory(trainable: int) -> OptimizerMemory:
    """Return the bytes of an optimizer of adapters, which are counted as for AdamW."""
    state = 2 * FLOAT * trainable
    return OptimizerMemory(state, 2 * state, state, TOGETHER * trainable)


def _update_bytes(
    optimizer: OptimizerName,
    weights: Sequence[tuple[str, tuple[int, ...], int]],
    on_gpu: bool,
    sharded: bool,
) -> int:
    """Return the temporaries of updating weights, given with a rank's counts of values."""
    if optimizer == "adamw_8bit":
        return QUANTIZING * min(UPDATED_VALUES, max(count for *_, count in weights))
    by_muon = [optimizer == "muon" and is_layer_matrix(name, shape) for name, shape, _ in weights]
    counts = [count for *_, count in weights]
    wholes = [math.prod(shape) for _, shape, _ in weights]
    matrices = [count for count, muon in zip(wholes, by_muon, strict=True) if muon]
    others = [count for count, muon in zip(counts, by_muon, strict=True) if not muon]
    adamw = TOGETHER * sum(others) if on_gpu else EACH * max(others, default=0)
    return max(adamw, (OWNING if sharded else ORTHOGONALIZING) * max(matrices, default=0))
