"""Long contexts: packed rows against each sequence by itself, and decoding during a long prompt.

    python benchmarks/long_context.py [--quick] [--json FILE]

Training: one forward and backward of a sequence of 8,192, 16,384 or 32,768 tokens with eight of an
eighth of its length, packed into one row, and one after the other. Each measurement runs in a
process of its own, which tells its peak memory. `packed_over_apart_time` is the worst ratio of the
lengths; `memory_growth` is the packed row's memory for a token at the longest length over that at
the shortest, 1 if memory is linear.

Serving: sessions decode on the embedded engine, and a prompt of 32,768 tokens comes.
`decode_slowdown` is the CPU time of a step of theirs while it is computed over that before.

Models have random weights, on one thread. `--quick` takes 2,048 and 4,096 tokens, and a prompt of
8,192: the same ratios, with less attention in them.
"""

import random
import statistics
import time
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from measuring import MIB, in_a_process, peak_bytes, random_qwen3, reset_peak
from report import Report, arguments

from composer_mesh.actors.engines.embedded import EmbeddedEngine
from composer_mesh.actors.models.attention_calls import PACKED
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.rollouts.generation import GenerationRequest

VOCABULARY = 2048
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
SHORT = 8
"""Sequences packed with the long one, each of an eighth of its length."""
DECODING = 8
SESSION = 256
"""Tokens of the prompt and of the answer of a session, which another one follows."""
LONG = "long"
WAYS = ("packed", "apart")


@dataclass(frozen=True)
class Measured:
    """CPU seconds of forward and backward, and the peak memory beyond the model."""

    seconds: float
    extra_bytes: int


def model_of(longest: int) -> Any:
    import composer_mesh.actors.models.packed_attention  # noqa: F401  (registers its name)

    return random_qwen3(
        SIZES | {"max_position_embeddings": longest + 1}, attn_implementation=PACKED
    )


def sequences_of(longest: int) -> list[list[int]]:
    rng = random.Random(0)
    lengths = [longest, *[longest // SHORT] * SHORT]
    return [[rng.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


def train(model: LanguageModel, sequences: list[list[int]]) -> None:
    """Add the gradients of the log-probs of all tokens of some sequences."""
    longest = max(map(len, sequences))
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    mask = torch.zeros(len(sequences), longest - 1, dtype=torch.bool)
    for row, one in enumerate(sequences):
        ids[row, : len(one)] = torch.tensor(one)
        mask[row, : len(one) - 1] = True
    model.logprobs(model.hidden(sequences), ids, mask).sum().backward()


def _measured(longest: int, way: str) -> Measured:
    torch.set_num_threads(1)
    sequences = sequences_of(longest)
    model = LanguageModel(model_of(longest), packing=True)
    train(model, [one[:8] for one in sequences])  # allocates gradients
    before = reset_peak()
    began = time.process_time()
    for part in [sequences] if way == "packed" else [[one] for one in sequences]:
        train(model, part)
    return Measured(time.process_time() - began, peak_bytes() - before)


def compare(report: Report, longest: int, repeats: int) -> tuple[float, float]:
    """Measure both ways in turn; return the ratio of times, and the packed row's bytes a token."""
    runs: dict[str, list[Measured]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way in WAYS:
            runs[way].append(in_a_process(_measured, longest, way))
    took = {way: min(one.seconds for one in runs[way]) for way in WAYS}
    extra = {way: statistics.median(one.extra_bytes for one in runs[way]) for way in WAYS}
    rows = [[way, f"{took[way]:.2f} s", f"{extra[way] / MIB:,.0f} MiB"] for way in WAYS]
    ratio = took["packed"] / took["apart"]
    rows.append(["  packed / apart", f"{ratio:.3f}", f"{extra['packed'] / extra['apart']:.3f}"])
    name = f"[{longest:,}] + [{longest // SHORT:,}] x {SHORT}"
    report.print_table(name, ["sequences", "forward, backward, CPU", "peak memory"], rows)
    for way in WAYS:
        report.figures[f"{name}: {way}_s"] = round(took[way], 3)
        report.figures[f"{name}: {way}_mib"] = round(extra[way] / MIB, 1)
    report.figures[f"{name}: packed_over_apart_time"] = round(ratio, 4)
    return ratio, extra["packed"] / (2 * longest)


def _serving(prompt: int) -> dict[str, float]:
    """Return what steps of decoding take before a long prompt comes and while it is computed."""
    torch.set_num_threads(1)
    engine = EmbeddedEngine(model_of(prompt + 1).eval(), DECODING + 1, prompt + 1, prefix_tokens=0)
    rng, numbers, done = random.Random(0), count(), list[str]()

    def submit(name: str, length: int, new: int) -> None:
        ids = [rng.randrange(VOCABULARY) for _ in range(length)]
        engine.submit(GenerationRequest(name, ids, new, 1.0, 0, []), answered)

    def answered(result: Any) -> None:
        done.append(result.request_id)
        if result.request_id != LONG:
            submit(str(next(numbers)), SESSION, SESSION)

    def step() -> float:
        began = time.process_time()
        engine.step()
        return time.process_time() - began

    for number in range(DECODING):  # they end one after the other
        submit(str(next(numbers)), SESSION, SESSION * (number + 1) // DECODING)
    before = [step() for _ in range(3 * SESSION)][SESSION:]
    submit(LONG, prompt, 1)
    during: list[float] = []
    while LONG not in done:
        during.append(step())
    return {
        "before_ms": 1e3 * statistics.fmean(before),
        "beside_ms": 1e3 * statistics.fmean(during),
        "longest_before_ms": 1e3 * max(before),
        "longest_beside_ms": 1e3 * max(during),
        "prompt_s": sum(during),
        "steps": len(during),
    }


def serve(report: Report, prompt: int) -> float:
    """Measure steps of decoding during a long prompt; return their time over that without it."""
    found = in_a_process(_serving, prompt)
    rows = [[name, f"{value:,.2f}"] for name, value in found.items()]
    report.print_table(f"{DECODING} sessions during a prompt of {prompt:,}", ["a step", ""], rows)
    for name, value in found.items():
        report.figures[f"during a prompt of {prompt:,}: {name}"] = round(value, 3)
    return found["beside_ms"] / found["before_ms"]


def main() -> None:
    options = arguments((__doc__ or "").partition("\n")[0]).parse_args()
    lengths = (2048, 4096) if options.quick else (8192, 16_384, 32_768)
    report = Report("long_context")
    found = [compare(report, longest, 2) for longest in lengths]
    report.ratios["packed_over_apart_time"] = max(ratio for ratio, _ in found)
    report.ratios["memory_growth"] = found[-1][1] / found[0][1]
    report.ratios["decode_slowdown"] = serve(report, 8192 if options.quick else 32_768)
    report.finish(options.json)


if __name__ == "__main__":
    main()
