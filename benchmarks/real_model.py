"""A real pretrained model on one thread: the engine and the trainer against plain transformers.

    python benchmarks/real_model.py FOLDER [--gguf FILE] [--quick] [--part NAME ...] [--json FILE]

FOLDER holds a model in Hugging Face format, such as SmolLM2-135M-Instruct. Generation: 16 different
prompts side by side, sampled at temperature 1 with their log-probs, against `generate` with its
dynamic cache. With the model's GGUF file llama.cpp samples the same prompts, from the file and from
weights of the engine's type that were dequantized from it. Training: a step on 16 sequences against
a plain loop with the same microbatches, the head on the sampled tokens alone, clipping and AdamW.
Seconds are CPU time: with one thread they equal the time on an idle machine. Memory: the peak of a
process that trains such a step, compared with what `composer-mesh check` counts for it. A ratio
above 1 is faster, or less, than what it is compared with.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from measuring import peak_bytes, policy_step, reset_peak
from report import Report, arguments

from composer_mesh.actors.engines.embedded import EmbeddedEngine
from composer_mesh.actors.learning.step import OptimizerStep
from composer_mesh.actors.models.policy import converted, load_model
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.trained_model import trained_model
from composer_mesh.configs.schema import Config
from composer_mesh.planning.memory import GB, SHARED_CODE, total
from composer_mesh.planning.memory_estimate import memory_of
from composer_mesh.planning.model_sizes import sizes_of
from composer_mesh.rollouts.generation import GenerationRequest

SIDE_BY_SIDE, LARGEST_ID = 16, 40_000
LR = 1e-6
CHILD_S = 900
PARTS = ("generation", "training", "memory")


@dataclass(frozen=True)
class Effort:
    """Rounds after an uncounted one; tokens of a prompt, new ones, and those of a microbatch."""

    rounds: int
    prompt: int
    new: int
    microbatch: int


FULL, QUICK = Effort(1, 192, 32, 2048), Effort(1, 48, 8, 512)


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("folder", type=Path, nargs="?", help="a model in Hugging Face format")
    parser.add_argument(
        "--part", action="append", choices=PARTS, help="measure this part alone (default: all)"
    )
    parser.add_argument("--gguf", type=Path, help="the model's file, for llama.cpp")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    given = parser.parse_args()
    effort = QUICK if given.quick else FULL
    report = Report("real_model")
    if given.folder is None or not (given.folder / "config.json").is_file():
        for name in PARTS:
            report.missing[name] = f"no model in {given.folder}: name its folder"
        report.finish(given.json)
    if given.memory_of:
        print(json.dumps(measured_memory(given.folder, effort, json.loads(given.memory_of))))
        return 0
    torch.set_num_threads(1)
    parts = given.part or PARTS
    peer = given.gguf is not None and find_spec("llama_cpp") is not None
    if given.gguf is not None and not peer:
        report.missing["llama.cpp"] = "pip install llama-cpp-python"
    for dtype in ("float32", "bfloat16") if "generation" in parts else ():
        with tempfile.TemporaryDirectory() as made:
            ways = generation(given.folder, dtype)
            if peer:
                ways |= llama_cpp(given.gguf, dtype, Path(made))
            compare(report, f"generation, {dtype}", ways, effort)
    if "training" in parts:
        compare(report, "training, float32", training(given.folder, effort), effort)
    for name, trainer in MEMORY.items() if "memory" in parts else ():
        memory(report, given.folder, name, trainer, given.quick)
    report.print_table(
        f"{given.folder.name}, {SIDE_BY_SIDE} side by side, one thread",
        ("figure", "value"),
        [(name, f"{value:,.4g}") for name, value in report.figures.items()],
    )
    report.finish(given.json)
    return 0


Way = Callable[[list[list[int]], Effort], int]
"""Works on 16 prompts; returns the tokens that its speed counts."""


def compare(report: Report, name: str, ways: dict[str, Way], effort: Effort) -> None:
    """Alternate ways; add their tokens/s, and the ratio of the medians of the first two."""
    took: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(effort.rounds + 1):
        prompts = prompts_of(effort, number)
        for way, work in ways.items():
            began = time.process_time()
            tokens = work(prompts, effort)
            took[way].append(tokens / (time.process_time() - began))
    speeds = {way: statistics.median(found[1:]) for way, found in took.items()}
    for way, speed in speeds.items():
        report.figures[f"{name}: {way}, tokens/s"] = speed
    ours, theirs, *_ = speeds.values()
    report.ratios[name] = ours / theirs


def prompts_of(effort: Effort, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [
        [rng.randrange(20, LARGEST_ID) for _ in range(effort.prompt)] for _ in range(SIDE_BY_SIDE)
    ]


def generation(folder: Path, dtype: str) -> dict[str, Way]:
    engine = EmbeddedEngine(
        _model(folder, dtype), SIDE_BY_SIDE, FULL.prompt + FULL.new, prefix_tokens=0
    )
    other = _model(folder, dtype)

    def embedded(prompts: list[list[int]], effort: Effort) -> int:
        done: list[Any] = []
        for seed, prompt in enumerate(prompts):
            request = GenerationRequest(str(seed), prompt, effort.new, 1.0, seed, [])
            engine.submit(request, done.append)
        while engine.busy:
            engine.step()
        assert [len(one.logprobs) for one in done] == [effort.new] * len(prompts)
        return effort.new * len(prompts)

    @torch.inference_mode()
    def generate(prompts: list[list[int]], effort: Effort) -> int:
        ids = torch.tensor(prompts)
        output = other.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=effort.new,
            min_new_tokens=effort.new,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = output.sequences[:, effort.prompt :]
        scores = torch.stack(output.logits, 1).float().log_softmax(-1)
        return int(scores.gather(-1, tokens[..., None]).numel())

    return {"embedded engine": embedded, "transformers generate": generate}


def llama_cpp(file: Path, dtype: str, folder: Path) -> dict[str, Way]:
    """Return llama.cpp's ways: on weights of a dtype, made in a folder, and the file's own."""
    import llama_cpp as api

    same = folder / f"{dtype}.gguf"
    settings = api.llama_model_quantize_default_params()
    settings.ftype = {"float32": api.LLAMA_FTYPE_ALL_F32, "bfloat16": BF16}[dtype]
    settings.allow_requantize = True
    if api.llama_model_quantize(str(file).encode(), str(same).encode(), settings):
        raise SystemExit(f"llama.cpp cannot convert {file} to {dtype}: name a whole GGUF file")
    return {"llama.cpp": _llama_cpp(same), "llama.cpp, quantized": _llama_cpp(file)}


BF16 = 32
"""llama.cpp's LLAMA_FTYPE_MOSTLY_BF16."""


def _llama_cpp(file: Path) -> Way:
    import llama_cpp as api

    settings = api.llama_context_default_params()
    settings.n_ctx = SIDE_BY_SIDE * (FULL.prompt + FULL.new)
    settings.n_batch, settings.n_seq_max = SIDE_BY_SIDE * FULL.prompt, SIDE_BY_SIDE
    settings.n_threads = settings.n_threads_batch = 1
    model = api.llama_model_load_from_file(str(file).encode(), api.llama_model_default_params())
    context = api.llama_init_from_model(model, settings)
    vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    batch = api.llama_batch_init(settings.n_batch, 0, 1)

    def decode(rows: list[list[int]], position: int) -> torch.Tensor:
        """Read tokens of each row from a position on; return the scores after the last ones."""
        last = []
        for row, ids in enumerate(rows):
            for at, token in enumerate(ids):
                place = row * len(ids) + at
                batch.token[place], batch.pos[place] = token, position + at
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
                batch.logits[place] = at == len(ids) - 1
            last.append((row + 1) * len(ids) - 1)
        batch.n_tokens = sum(map(len, rows))
        if api.llama_decode(context, batch):
            raise SystemExit(f"llama.cpp cannot decode {batch.n_tokens} tokens with {file}")
        found = [api.llama_get_logits_ith(context, place) for place in last]
        return torch.stack(
            [torch.from_numpy(np.ctypeslib.as_array(one, (vocabulary,))).clone() for one in found]
        )

    def sampled(prompts: list[list[int]], effort: Effort) -> int:
        api.llama_memory_clear(api.llama_get_memory(context), True)
        rows, logprobs = prompts, []
        for number in range(effort.new):
            scores = decode(rows, number and effort.prompt + number - 1).log_softmax(-1)
            chosen = scores.exp().multinomial(1)
            logprobs.append(scores.gather(-1, chosen))
            rows = chosen.tolist()
        return sum(one.numel() for one in logprobs)

    return sampled


def _model(folder: Path, dtype: str) -> Any:
    model = load_model(folder)
    converted(model, getattr(torch, dtype))
    return model.eval()


def config_of(folder: Path, effort: Effort, trainer: dict[str, Any]) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "real-model", "steps": 3},
            "data": {"task": "toolbox"},
            "policy": {"path": str(folder), "max_context": effort.prompt + 2 * effort.new},
            "generator": {"max_new_tokens": 16},
            "trainer": {"lr": LR, "microbatch_tokens": effort.microbatch, **trainer},
            "sdpo": {"alpha": 0.0},
            "replay": {"beta": 0.0},
        }
    )


def training(folder: Path, effort: Effort) -> dict[str, Way]:
    config = config_of(folder, effort, {})
    step = OptimizerStep(trained_model(config, folder, Ranks()), None, config, Ranks())
    model = load_model(folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    rows = effort.microbatch // effort.prompt

    def ours(prompts: list[list[int]], effort: Effort) -> int:
        step.run(policy_step(prompts, effort.new), None)
        return sum(map(len, prompts))

    def plain(prompts: list[list[int]], effort: Effort) -> int:
        count = effort.new * len(prompts)
        for first in range(0, len(prompts), rows):
            ids = torch.tensor(prompts[first : first + rows])
            signs = torch.tensor([1.0 if n % 2 else -1.0 for n in range(first, first + len(ids))])
            states = model.model(input_ids=ids, use_cache=False).last_hidden_state
            logits = model.lm_head(states[:, -effort.new - 1 : -1])
            logprobs = logits.log_softmax(-1).gather(-1, ids[:, -effort.new :, None])[..., 0]
            (-(logprobs * signs[:, None]).sum() / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return sum(map(len, prompts))

    return {"trainer": ours, "plain loop": plain}


MEMORY: dict[str, dict[str, Any]] = {
    "memory": {},
    "memory, checkpointing": {"activation_checkpointing": True},
    "memory, bfloat16": {"compute_dtype": "bfloat16"},
}


def memory(report: Report, folder: Path, name: str, trainer: dict[str, Any], quick: bool) -> None:
    """Add a process's peak and its estimate, and the ratio of estimate to peak."""
    command = [sys.executable, __file__, str(folder), "--memory-of", json.dumps(trainer)]
    done = subprocess.run(
        [*command, *["--quick"] * quick],
        stdout=subprocess.PIPE,
        text=True,
        timeout=CHILD_S,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    for key, value in found.items():
        report.figures[f"{name}: {key}, GB"] = value / GB
    report.ratios[f"{name}: estimate / peak"] = found["estimate"] / found["peak"]


def measured_memory(folder: Path, effort: Effort, trainer: dict[str, Any]) -> dict[str, float]:
    """Train two steps of one microbatch in this process; return the bytes at the most, counted."""
    config = config_of(folder, effort, trainer)
    parts = memory_of("trainer", config, sizes_of(config.policy)).host
    ranks = Ranks()
    step = OptimizerStep(trained_model(config, folder, ranks), None, config, ranks)
    reset_peak()  # that of loading
    rows = effort.microbatch // effort.prompt
    for number in range(2):
        step.run(policy_step(prompts_of(effort, number)[:rows], effort.new), None)
    # A checkpoint's copy and published weights are not made here.
    training = [one for one in parts if one.what not in ("weights on offer", "a checkpoint's copy")]
    return {"estimate": total(training) + SHARED_CODE, "peak": peak_bytes()}


if __name__ == "__main__":
    sys.exit(main())
