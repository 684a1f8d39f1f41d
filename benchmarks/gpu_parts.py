"""Parts of `gpu_day.py`: each measures one thing that a run needs of the hardware.

A part returns rows, or yields them, so that those before a failure are kept: what was measured, in
which unit, and the limit that it is compared with. FLOPs are those of the mathematics, so
recomputing (checkpointed layers, fused losses) lowers a ratio.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from gpu_limits import GIB, Limits, compute_dtype, host_memory, seconds, synchronize
from measuring import random_qwen3
from torch import Tensor

LIMIT_S = 90.0
"""Seconds of a part, unless `gpu_day` has more for it."""
OPTIMIZED_BYTES = 16
"""Bytes for each trained weight: float32 weight, gradient and two moments."""


@dataclass(frozen=True)
class Size:
    """The shapes of all parts; `real` are those of an 8B model on one card."""

    rows: int
    hidden: int
    vocabulary: int
    intermediate: int
    heads: int
    kv_heads: int
    most_layers: int
    tokens: int
    packed: tuple[int, ...]
    serving_layers: int
    concurrent: int
    new_tokens: int
    matmul_side: int
    copied_bytes: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def layer_weights(self) -> int:
        """Weights of one decoder layer, without norms."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    def layers_that_train(self, memory: int) -> int:
        """Return how many layers fit into 60 % of a memory with their optimizer state."""
        left = 0.6 * memory / OPTIMIZED_BYTES - 2 * self.vocabulary * self.hidden
        return max(1, min(self.most_layers, int(left / self.layer_weights)))


REAL = Size(
    rows=16_384,
    hidden=4096,
    vocabulary=151_936,
    intermediate=12_288,
    heads=32,
    kv_heads=8,
    most_layers=36,
    tokens=16_384,
    packed=(8192, *[1024] * 8),
    serving_layers=36,
    concurrent=64,
    new_tokens=128,
    matmul_side=8192,
    copied_bytes=4 * GIB,
)
DRY = Size(
    rows=64,
    hidden=64,
    vocabulary=512,
    intermediate=128,
    heads=4,
    kv_heads=2,
    most_layers=2,
    tokens=512,
    packed=(128, *[32] * 4),
    serving_layers=2,
    concurrent=4,
    new_tokens=8,
    matmul_side=256,
    copied_bytes=1 << 22,
)


@dataclass(frozen=True)
class Row:
    """One measurement: its value, its unit, and the best that the hardware could do."""

    name: str
    value: float
    unit: str
    limit: float
    bar: float | None = None
    """What the ratio has to reach, or with `at_most` may not exceed; None for a mere figure."""
    at_most: bool = False
    profile: list[dict[str, Any]] = field(default_factory=list)
    """Kernels of a measurement that does not meet its bar, by `gpu_profile`."""

    @property
    def ratio(self) -> float:
        """The part of the limit that was reached."""
        return self.value / self.limit

    @property
    def met(self) -> bool:
        """Whether the ratio meets its bar; without one it does."""
        if self.bar is None:
            return True
        return self.ratio <= self.bar if self.at_most else self.ratio >= self.bar

    def as_json(self, judged: bool = True) -> dict[str, Any]:
        """Return the row for a file of results; tiny sizes are not `judged`."""
        met = self.met if judged and self.bar is not None else None
        return {**asdict(self), "ratio": self.ratio, "met": met}


@dataclass(frozen=True)
class Bench:
    """What every part gets."""

    device: torch.device
    size: Size
    limits: Limits
    attention: str
    """transformers' name of the attention that models use."""


def attention(bench: Bench) -> list[Row]:
    """Measure a row of packed sequences with a dense mask and with FlexAttention.

    The limit is the time of each sequence by itself. Forward only on a CPU, where FlexAttention has
    no backward.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from torch.nn.functional import scaled_dot_product_attention

    size, device, dtype = bench.size, bench.device, compute_dtype(bench.device)
    total = sum(size.packed)
    query, key, value = (
        torch.randn(1, size.heads, total, size.head_dim, device=device).to(dtype) for _ in range(3)
    )
    backward = device.type == "cuda"
    for one in (query, key, value):
        one.requires_grad_(backward)
    lengths = torch.tensor(size.packed, device=device)
    document = torch.repeat_interleave(torch.arange(len(size.packed), device=device), lengths)
    places = torch.arange(total, device=device)
    dense = (document[:, None] == document) & (places[:, None] >= places)

    def allowed(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (document[query] == document[key]) & (query >= key)

    blocks = create_block_mask(allowed, None, None, total, total, device=str(device))
    flex = torch.compile(flex_attention) if device.type == "cuda" else flex_attention

    def timed(call: Callable[[], Tensor]) -> float:
        def whole() -> None:
            found = call()
            if backward:
                found.sum().backward()

        return seconds(whole, device, 3)

    def apart() -> Tensor:
        parts, begin = [], 0
        for length in size.packed:
            here = slice(begin, begin := begin + length)
            one = (query[:, :, here], key[:, :, here], value[:, :, here])
            parts.append(scaled_dot_product_attention(*one, is_causal=True))
        return torch.cat(parts, 2)

    ways = {
        "dense mask": lambda: scaled_dot_product_attention(query, key, value, attn_mask=dense),
        "FlexAttention": lambda: flex(query, key, value, block_mask=blocks),
    }
    with torch.no_grad():
        expected = apart()
        for name, call in ways.items():
            worst = float((call() - expected).abs().max())
            if not worst < 0.05:
                raise AssertionError(f"{name} differs from each sequence by itself by {worst:.3g}")
    fastest = timed(apart)
    return [
        Row(f"packed, {name}", 1 / timed(call), "1/s", 1 / fastest) for name, call in ways.items()
    ]


def serving(bench: Bench) -> list[Row]:
    """Measure decoding of the embedded engine: each step reads all weights once.

    Once with its steps replayed as CUDA graphs, once launched kernel by kernel. On a CPU, which has
    no graphs, the steps of both have the shapes that they would have.
    """
    from gpu_profile import explained

    from composer_mesh.actors.engines.embedded import EmbeddedEngine
    from composer_mesh.actors.engines.embedded_decode import CudaGraphs

    size, device = bench.size, bench.device
    model = random_model(bench, size.serving_layers, compute_dtype(device)).eval()
    ways = {
        "CUDA graphs": CudaGraphs() if device.type == "cuda" else lambda step: step,
        "no graphs": None,
    }
    read = sum(one.numel() * one.element_size() for one in model.parameters()) / 1e9
    limit = bench.limits.memory_gb_s / read * size.concurrent
    rows = []
    for name, capture in ways.items():
        length = PROMPT + size.new_tokens
        engine = EmbeddedEngine(model, size.concurrent, length, prefix_tokens=0, capture=capture)
        rate = decoding_rate(bench, engine)
        what = f"embedded engine, {name}, {size.concurrent} at once"
        row = Row(what, rate, "tokens/s", limit, None if capture is None else 0.5)
        rows.append(explained(bench, row, partial(decoding_rate, bench, engine)))
    return rows


def decoding_rate(bench: Bench, engine: Any) -> float:
    """Return the tokens/s with which an embedded engine answers a full batch, once it is warm."""
    from composer_mesh.rollouts.generation import GenerationRequest

    size, rng = bench.size, random.Random(0)
    done: list[Any] = []

    def sample() -> None:
        for number in range(size.concurrent):
            ids = [rng.randrange(size.vocabulary) for _ in range(PROMPT)]
            name = f"{len(done)}-{number}"
            engine.submit(
                GenerationRequest(name, ids, size.new_tokens, 1.0, number, []), done.append
            )
        while engine.busy:
            engine.step()

    took = seconds(sample, bench.device, 1)
    if any(len(one.token_ids) != size.new_tokens for one in done):
        raise AssertionError("an answer has fewer tokens than were requested")
    return size.concurrent * size.new_tokens / took


def fp8(bench: Bench) -> list[Row]:
    """Measure FP8 weights of the embedded engine: speed and mismatch, compared with its type."""
    from gpu_fp8 import compared

    return compared(
        bench, lambda: random_model(bench, bench.size.serving_layers, torch.bfloat16).eval()
    )


def weight_copies(bench: Bench) -> list[Row]:
    """Measure copies of a model's tensors to the host and back, as a publisher and a puller make.

    They run on a stream of their own, as they do during a step.
    """
    size, device = bench.size, bench.device
    model = random_model(bench, size.serving_layers, compute_dtype(device))
    tensors = [one.detach() for one in model.parameters()]
    total = sum(one.nbytes for one in tensors)
    host = host_memory(total, device)
    places = list(_places(host, tensors))
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copied(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        synchronize(device)

    out = seconds(lambda: copied(list(zip(places, tensors, strict=True))), device, 3)
    back = seconds(lambda: copied(list(zip(tensors, places, strict=True))), device, 3)
    limits = bench.limits
    return [
        Row("weights to the host", total / 1e9 / out, "GB/s", limits.to_host_gb_s),
        Row("weights to the device", total / 1e9 / back, "GB/s", limits.to_device_gb_s),
    ]


PARTS: dict[str, Callable[[Bench], list[Row]]] = {
    "attention": attention,
    "serving": serving,
    "fp8": fp8,
    "weights": weight_copies,
}
PROMPT = 32


def _places(host: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    places, begin = [], 0
    for one in tensors:
        end = begin + one.nbytes
        places.append(host[begin:end].view(one.dtype).view(one.shape))
        begin = end
    return places


def random_model(bench: Bench, layers: int, dtype: torch.dtype) -> Any:
    """Return a Qwen3 of random weights, made on the device."""
    size = bench.size
    sizes = {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "max_position_embeddings": max(size.tokens, 4096),
        "tie_word_embeddings": False,
    }
    how = {"dtype": dtype, "attn_implementation": bench.attention}
    return random_qwen3(sizes, str(bench.device), **how)
