"""Fused against naive losses, from hidden states and a head: peak memory, time, and scaling.

    python benchmarks/losses.py [--quick] [--json FILE] [--device cuda]

Naive means the unfused functions of `composer_mesh.losses` on complete logits. Extra memory is the
peak of forward and backward beyond the inputs and the gradients that both must return. On a CPU
each memory figure comes from a separate process (the peak resident size that Linux records for it),
so that memory freed by one measurement does not hide the next; times alternate in one process.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from measuring import MIB, in_a_process, in_turns, peak_bytes, reset_peak
from report import Report, arguments
from torch import Tensor

from composer_mesh.losses.distillation import generalized_jsd
from composer_mesh.losses.fused import linear_jsd, linear_logprobs
from composer_mesh.losses.policy import token_logprobs

KINDS = ("jsd", "logprobs")
BETA = 0.5


@dataclass(frozen=True)
class Size:
    """A problem size; `dtype` is that of hidden states and heads."""

    rows: int
    hidden: int
    vocabulary: int
    dtype: str = "float32"
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.rows:,} x {self.hidden:,} x {self.vocabulary:,} {self.dtype}"


@dataclass(frozen=True)
class Inputs:
    """Leaf tensors of one forward and backward."""

    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    targets: Tensor

    @classmethod
    def make(cls, size: Size) -> "Inputs":
        generator = torch.Generator(size.device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            values = torch.randn(shape, generator=generator, device=size.device)
            return values.mul_(shape[-1] ** -0.25).to(getattr(torch, size.dtype))

        high, rows = size.vocabulary, (size.rows,)
        return cls(
            draw(size.rows, size.hidden).requires_grad_(),
            draw(size.vocabulary, size.hidden).requires_grad_(),
            draw(size.rows, size.hidden),
            draw(size.vocabulary, size.hidden),
            torch.randint(0, high, rows, generator=generator, device=size.device),
        )

    def gradient_bytes(self) -> int:
        return sum(leaf.numel() * leaf.element_size() for leaf in (self.hidden, self.weight))


def naive_jsd(inputs: Inputs) -> Tensor:
    rows = len(inputs.hidden)
    return generalized_jsd(
        inputs.hidden @ inputs.weight.T,
        inputs.teacher_hidden @ inputs.teacher_weight.T,
        torch.ones(rows, dtype=torch.bool, device=inputs.hidden.device),
        jsd_beta=BETA,
        normalizer=rows,
    )


def fused_jsd(inputs: Inputs) -> Tensor:
    return linear_jsd(
        inputs.hidden,
        inputs.weight,
        inputs.teacher_hidden,
        inputs.teacher_weight,
        jsd_beta=BETA,
        normalizer=len(inputs.hidden),
    )


def naive_logprobs(inputs: Inputs) -> Tensor:
    return token_logprobs(inputs.hidden @ inputs.weight.T, inputs.targets).mean()


def fused_logprobs(inputs: Inputs) -> Tensor:
    return linear_logprobs(inputs.hidden, inputs.weight, inputs.targets).mean()


LOSSES: dict[str, Callable[[Inputs], Tensor]] = {
    "naive_jsd": naive_jsd,
    "fused_jsd": fused_jsd,
    "naive_logprobs": naive_logprobs,
    "fused_logprobs": fused_logprobs,
}


def run(loss: str, inputs: Inputs) -> None:
    """Run one forward and backward into fresh gradients."""
    inputs.hidden.grad = inputs.weight.grad = None
    LOSSES[loss](inputs).backward()


def extra_bytes(loss: str, size: Size) -> float:
    """Return one run's peak bytes beyond inputs and gradients; nan on too small devices."""
    if size.device != "cpu":
        return _extra_on_device(loss, size)
    return in_a_process(_extra_on_cpu, loss, size)


def _extra_on_cpu(loss: str, size: Size) -> float:
    small = replace(size, rows=8, vocabulary=64)
    run(loss, Inputs.make(small))  # libraries load and reserve their own memory
    inputs = Inputs.make(size)
    before = reset_peak()
    run(loss, inputs)
    return peak_bytes() - before - inputs.gradient_bytes()


def _extra_on_device(loss: str, size: Size) -> float:
    inputs = Inputs.make(size)
    before = reset_peak(size.device)
    try:
        run(loss, inputs)
    except torch.OutOfMemoryError:
        return float("nan")
    torch.cuda.synchronize()
    return peak_bytes(size.device) - before - inputs.gradient_bytes()


def seconds(kind: str, size: Size, repeats: int) -> dict[str, float]:
    """Return median seconds of naive and fused, alternating; nan where the device is too small."""
    inputs, failed = Inputs.make(size), set[str]()

    def once(way: str) -> None:
        try:
            run(f"{way}_{kind}", inputs)
            if inputs.hidden.is_cuda:
                torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            failed.add(way)

    took = in_turns({way: partial(once, way) for way in ("naive", "fused")}, repeats)
    return {
        way: float("nan") if way in failed else statistics.median(times)
        for way, times in took.items()
    }


def compare(report: Report, size: Size, repeats: int) -> None:
    """Compare memory and time of both losses at one size; ratios are the worse of the two."""
    rows = []
    memory, times = [], []
    for kind in KINDS:
        extra = {way: extra_bytes(f"{way}_{kind}", size) for way in ("naive", "fused")}
        took = seconds(kind, size, repeats)
        memory.append(extra["fused"] / extra["naive"])
        times.append(took["fused"] / took["naive"])
        for way in ("naive", "fused"):
            report.figures[f"{way}_{kind}_extra_mib"] = round(extra[way] / MIB, 1)
            report.figures[f"{way}_{kind}_s"] = round(took[way], 3)
            rows.append(
                [f"{way} {kind}", f"{extra[way] / MIB:,.0f} MiB", f"{took[way] * 1e3:,.0f} ms"]
            )
        rows.append([f"  fused / naive, {kind}", f"{memory[-1]:.3f}", f"{times[-1]:.2f}"])
    report.print_table(str(size), ["loss", "peak extra memory", "forward + backward"], rows)
    report.ratios["fused_memory_over_naive"] = max(memory)
    report.ratios["fused_time_over_naive"] = max(times)


def growth(report: Report, size: Size) -> None:
    """Measure peak extra memory and time as rows, then as the vocabulary double."""
    sizes = [replace(size, rows=size.rows * factor) for factor in (1, 2, 4)]
    sizes += [replace(size, vocabulary=size.vocabulary * factor) for factor in (2, 4)]
    rows = []
    for each in sizes:
        row = [str(each)]
        for kind in KINDS:
            took = seconds(kind, each, 1)
            for way in ("naive", "fused"):
                extra = extra_bytes(f"{way}_{kind}", each) / MIB
                report.figures[f"{way}_{kind}_extra_mib at {each}"] = round(extra, 1)
                row.append(f"{extra:,.0f} / {took[way] * 1e3:,.0f}")
        rows.append(row)
    columns = [f"{way} {kind}" for kind in KINDS for way in ("naive", "fused")]
    report.print_table("growth: extra MiB / ms", ["rows x hidden x vocabulary", *columns], rows)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    report = Report("losses")
    if options.device == "cuda":
        main_size = Size(16_384, 4_096, 151_936, "bfloat16", "cuda")
        base = Size(2_048, 4_096, 32_768, "bfloat16", "cuda")
    elif options.quick:
        main_size, base = Size(512, 512, 16_384), Size(128, 256, 4_096)
    else:
        main_size, base = Size(2_048, 1_024, 32_768), Size(512, 512, 8_192)
    compare(report, main_size, 2 if options.quick else 5)
    growth(report, base)
    report.finish(options.json)


if __name__ == "__main__":
    main()
