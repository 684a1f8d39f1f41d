"""GPU memory of a trainer's step compared with what `composer-mesh check` estimates for it.

    python benchmarks/trainer_memory.py [--dry] [--json FILE] [--case NAME ...]

Each case trains two steps of 16,384 tokens of a model with the sizes of Qwen3-1.7B in a process of
its own, with the device and the code of a trainer, and reads what the GPU holds at the most: what
torch's allocator has reserved, together with the CUDA context. Needs a GPU with 80 GB, or `--dry`,
which runs the same code with tiny sizes on a CPU and measures nothing. A ratio is measured /
estimated: above 1, a run that `check` lets through may run out of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from measuring import policy_step, random_qwen3, random_sequences
from report import Report

from composer_mesh.mesh.process_resources import share_env

GB = 1 << 30
SIZES: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
DRY_SIZES = SIZES | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TOKENS, DRY_TOKENS = 16_384, 512
SEQUENCES = 8
CHECKPOINTED = {"activation_checkpointing": True}
CASES: dict[str, dict[str, Any]] = {
    "all kept": {},
    "checkpointing": CHECKPOINTED,
    "activation_offload": CHECKPOINTED | {"activation_offload": True},
    "optimizer_offload": CHECKPOINTED | {"optimizer_offload": True},
    "adamw_8bit": CHECKPOINTED | {"optimizer": "adamw_8bit"},
    "muon": CHECKPOINTED | {"optimizer": "muon"},
    "flex": CHECKPOINTED | {"attention": "flex"},
    "float32": CHECKPOINTED | {"compute_dtype": "float32"},
}
CASE_S = 240


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on a CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures and ratios")
    parser.add_argument("--case", action="append", choices=CASES, metavar="NAME")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.dry and not torch.cuda.is_available():
        print("torch finds no CUDA device: run this on a machine with a GPU, or with --dry")
        return 2
    if given.write:
        write_model(given.folder, given.dry)
        return 0
    if given.folder is not None:
        print(json.dumps(measured(given.folder, given.case[0], given.dry)))
        return 0
    report, failed, rows = Report("trainer_memory"), [], []
    dry = ["--dry"] if given.dry else []
    with tempfile.TemporaryDirectory() as folder:
        _run("--folder", folder, "--write", *dry)
        for name in given.case or _cases(given.dry):
            printed = _run("--folder", folder, "--case", name, *dry)
            if printed is None:
                failed.append(name)
                continue
            found = json.loads(printed.splitlines()[-1])
            rows.append((name, *(f"{found[key] / GB:.2f}" for key in COLUMNS), _ratio(found)))
            report.figures |= {f"{name}: {key}, GB": found[key] / GB for key in COLUMNS}
            if found["measured"]:
                report.ratios[name] = found["measured"] / found["estimated"]
    report.print_table("GB of GPU memory of a trainer", ("case", *COLUMNS, "ratio"), rows)
    report.finish(given.json)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


COLUMNS = ("estimated", "measured", "allocated", "reserved", "context")


def _ratio(found: dict[str, float]) -> str:
    return f"{found['measured'] / found['estimated']:.2f}" if found["measured"] else ""


def _cases(dry: bool) -> list[str]:
    on_gpus_only = {"flex"}
    return [name for name in CASES if not (dry and name in on_gpus_only)]


def write_model(folder: Path, dry: bool) -> None:
    """Write a Qwen3 of random weights."""
    device = "cpu" if dry else "cuda"
    model = random_qwen3(DRY_SIZES if dry else SIZES, device, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def _run(*arguments: str) -> str | None:
    """Return what this script prints in a process of its own, which has the GPU for itself."""
    command = [sys.executable, __file__, *arguments]
    gpus = [0] if torch.cuda.is_available() and "--dry" not in arguments else []
    environment = os.environ | share_env(os.cpu_count() or 1, gpus=gpus)
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=CASE_S,
        check=False,
    )
    return None if done.returncode else done.stdout


def measured(folder: Path, name: str, dry: bool) -> dict[str, float]:
    """Train two steps; return the bytes that were estimated, and those that the GPU held."""
    from composer_mesh.actors.learning.step import OptimizerStep
    from composer_mesh.actors.models.ranks import Ranks
    from composer_mesh.actors.models.trained_model import trained_model
    from composer_mesh.mesh.device import own_device
    from composer_mesh.planning.memory import total
    from composer_mesh.planning.memory_estimate import memory_of

    config = _config(folder, name, dry)
    assert config.policy.sizes is not None
    estimated = total(memory_of("trainer", config, config.policy.sizes).gpu)
    ranks = Ranks(device=own_device())
    step = OptimizerStep(trained_model(config, folder, ranks), None, config, ranks)
    length = (DRY_TOKENS if dry else TOKENS) // SEQUENCES
    sequences = random_sequences(SEQUENCES, length, config.policy.sizes.vocab_size)
    batch = policy_step(sequences, length * 3 // 4)
    for _ in range(2):
        norm = step.run(batch, None)["policy/grad_norm"]
        if not 0 < float(norm or 0.0) < float("inf"):
            raise AssertionError(f"the gradient's norm is {norm}, but must be finite and above 0")
    held = dict.fromkeys(COLUMNS, 0.0) | {"estimated": float(estimated)}
    if not dry:
        held["allocated"] = torch.cuda.max_memory_allocated()
        held["reserved"] = torch.cuda.max_memory_reserved()
        free, whole = torch.cuda.mem_get_info()
        held["context"] = whole - free - torch.cuda.memory_reserved()
        held["measured"] = held["reserved"] + held["context"]
    return held


def _config(folder: Path, name: str, dry: bool) -> Any:
    from composer_mesh.configs.schema import Config

    tokens = DRY_TOKENS if dry else TOKENS
    trainer: dict[str, Any] = {
        "compute_dtype": "bfloat16",
        "sharding": "fsdp2",
        "packing": True,
        "microbatch_tokens": tokens,
    }
    return Config.model_validate(
        {
            "run": {"name": "trainer-memory", "steps": 3},
            "data": {"task": "toolbox"},
            "policy": {
                "path": str(folder),
                "max_context": tokens // SEQUENCES,
                "sizes": {"model_type": "qwen3"} | (DRY_SIZES if dry else SIZES),
            },
            "generator": {"max_new_tokens": 16},
            "trainer": trainer | CASES[name],
            "sdpo": {"alpha": 0.0},
            "replay": {"beta": 0.0},
            "placement": {"trainer": {"gpus": 0 if dry else 1}},
        }
    )


if __name__ == "__main__":
    sys.exit(main())
