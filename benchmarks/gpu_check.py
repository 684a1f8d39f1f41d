"""What one GPU does for a run, as parts of what it could do: losses, training, serving, copies.

    python benchmarks/gpu_check.py [--dry] [--json FILE] [--part NAME ...]

Needs torch 2.11 or newer and a GPU, or `--dry`, which runs the same code with tiny sizes on a CPU.
Neither Monarch nor the network is needed; parts for which a package is missing say so. `run` trains
five steps of the quickstart with the trainer and the generator on the GPU, where Monarch is there.
The exit status is 1 where a part fails.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
from gpu_colocate import PARTS as COLOCATE
from gpu_limits import Limits, nominal, reset_peak
from gpu_parts import DRY, PARTS, REAL, Bench, Row
from report import Report

ALL = {**PARTS, **COLOCATE}
ROOT = Path(__file__).parent.parent
RUN = "run"
RUN_S = 240
OLDEST = (2, 11)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on a CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures and ratios")
    parser.add_argument("--part", action="append", choices=[*ALL, RUN], metavar="NAME")
    given = parser.parse_args()
    if refusal := unusable(given.dry):
        print(refusal, file=sys.stderr)
        return 2
    report = Report("gpu_check")
    wanted = given.part or [*ALL, *([] if given.dry else [RUN])]
    bench = _bench(report, given.dry)
    failed = [name for name in wanted if not _measured(report, bench, name)]
    report.finish(given.json)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def unusable(dry: bool) -> str:
    """Return why nothing can be measured here; empty if it can."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < OLDEST:
        return f"torch is {torch.__version__}, but 2.11 is the oldest that is measured: upgrade it"
    if not dry and not torch.cuda.is_available():
        return "torch finds no CUDA device: run this on a machine with a GPU, or with --dry"
    return ""


def _bench(report: Report, dry: bool) -> Bench:
    device, size = torch.device("cpu" if dry else "cuda"), DRY if dry else REAL
    limits = Limits.measured(device, size.matmul_side, size.copied_bytes)
    name, sheet = nominal(device)
    report.figures |= {"device": name, "torch": torch.__version__, **vars(limits)}
    rows = [
        ("matrices", f"{limits.matmul_tflops:,.3g} TFLOP/s", _of(limits.matmul_tflops, sheet, 0)),
        ("memory", f"{limits.memory_gb_s:,.0f} GB/s", _of(limits.memory_gb_s, sheet, 1)),
        ("to the host", f"{limits.to_host_gb_s:,.1f} GB/s", ""),
        ("to the device", f"{limits.to_device_gb_s:,.1f} GB/s", ""),
    ]
    report.print_table(f"limits of {name}", ("limit", "measured", "of the data sheet"), rows)
    if dry:
        print("--dry: the figures say only that everything runs")
    return Bench(device, size, limits, "sdpa")


def _of(measured: float, sheet: tuple[float, float] | None, place: int) -> str:
    return "" if sheet is None else f"{measured / sheet[place]:.2f}"


def _measured(report: Report, bench: Bench, name: str) -> bool:
    """Measure a part and report it; return False where it fails."""
    began = time.perf_counter()
    try:
        rows = _quickstart() if name == RUN else ALL[name](bench)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("composer_mesh"):
            raise  # a module of ours that has moved is a defect of this script
        report.figures[f"{name}: left out"] = f"{error.name} is not installed"
        print(f"{name}: left out, {error.name} is not installed")
        return True
    except Exception:  # noqa: BLE001  each failure is reported, and the other parts are measured
        traceback.print_exc()
        report.figures[f"{name}: failed"] = traceback.format_exc(limit=1).splitlines()[-1]
        return False
    finally:
        reset_peak(bench.device)
    report.figures[f"{name}: seconds"] = round(time.perf_counter() - began, 1)
    table = [
        (row.name, f"{row.value:,.4g} {row.unit}", f"{row.limit:,.4g}", f"{row.ratio:.3f}")
        for row in rows
    ]
    report.print_table(name, ("measured", "value", "limit", "ratio"), table)
    for row in rows:
        report.figures[f"{row.name}, {row.unit}"] = row.value
        report.ratios[row.name] = row.ratio
    return True


def _quickstart() -> list[Row]:
    """Train five steps on the GPU; the limit of its steps is the run's own wait for rollouts."""
    import monarch  # noqa: F401  without it there is no run

    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(
                sys.executable,
                "-m",
                "composer_mesh",
                "train",
                str(ROOT / "configs/quickstart.toml"),
            ),
            *("--output", f"{folder}/run", "--set", "run.steps=5"),
            *("--set", "placement.trainer.gpus=0.5", "--set", "placement.generator.gpus=0.4"),
        ]
        subprocess.run(command, check=True, timeout=RUN_S)
        metrics = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [Row("steps of the quickstart", len(metrics), "steps", 5)]


if __name__ == "__main__":
    sys.exit(main())
