"""Warm start: supervised fine-tuning on imperfect demonstrations, before RL.

It gives a policy that knows the format, half of the task, and how to use a hint. The result is a
folder in Hugging Face format, cached by everything that it depends on. `rollouts.demonstrations`
generates the imperfect conversations; docs/decisions/0006 explains the method.
"""

import hashlib
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors.models.policy import build_model, build_tokenizer, frame, save_policy
from composer_mesh.configs.policy import WarmStartConfig
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.progress import made_progress
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.packing import microbatches
from composer_mesh.tasks.loading import source_of
from composer_mesh.tasks.playing import Demonstration, Piece, conversations, encode
from composer_mesh.tasks.task import Task

CACHE_FORMAT = 3
FORWARD_TOKENS = 1024
MUON_RATE_RATIO = 7.0
IGNORE = -100


Report = Callable[[str], None]
"""Called with what is being done, such as `step 20 of 540, loss 1.32`."""
TOLD_EVERY = 100
"""Demonstrations between two reports."""


def _silent(_text: str) -> None:
    pass


def _unserved(_config: Config, _task: Task) -> AbstractContextManager[None]:
    return nullcontext()


def policy_folder(config: Config) -> Path:
    """Return the path of this config's warm-started policy, whether or not it exists yet."""
    parts = [
        config.policy.model_dump_json(exclude={"cache_dir", "start"}),
        config.data.model_dump_json(),
    ]
    parts += [config.environment.model_dump_json(), str(config.run.seed), str(CACHE_FORMAT)]
    for one in config.data.tasks:
        files = [one.path, source_of(one.task)]
        parts += [_digest(path) for path in files if path is not None]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return config.policy.cache_dir / f"warm-start-{digest}"


def _digest(path: Path | str) -> str:
    if isinstance(path, str):
        return path  # the id of a dataset, at its commit
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    content = b"".join(file.read_bytes() for file in files if file.is_file())
    return hashlib.sha256(content).hexdigest()


def prepare_policy(
    config: Config,
    task: Task,
    report: Report = _silent,
    serving: Callable[[Config, Task], AbstractContextManager[None]] = _unserved,
) -> Path:
    """Return the folder of the initial policy: the user's own, the cached, or a new warm start.

    A partially written cache is never used. `serving` opens what the task's sessions use, for as
    long as demonstrations are played.
    """
    if config.policy.folder is not None:
        return config.policy.folder
    folder = policy_folder(config)
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch, serving(config, task):
        model, tokenizer = warm_start(config, task, report)
        save_policy(model, tokenizer, Path(scratch) / "policy")
        if not folder.exists():
            shutil.move(Path(scratch) / "policy", folder)
    return folder


def warm_start(config: Config, task: Task, report: Report) -> tuple[Any, Any]:
    """Train a model and its tokenizer; the same config and seed give the same weights."""
    settings = config.policy.warm_start
    rng = random.Random(f"{config.run.seed}:demonstrations")
    flawless = settings.model_copy(update={"error_rate": 0.0})
    phases = {"flawless": flawless, "imperfect": settings}
    right, imperfect = (_played(task, *phase, rng, report) for phase in phases.items())
    report("training the tokenizer")
    corpus = [text for conversation in imperfect for _, text in conversation]
    corpus += [frame(task.tools)] * len(imperfect)
    tokenizer = build_tokenizer(corpus, config.policy.vocab_size)
    chat = ChatFormat(tokenizer, task.tools)
    report("encoding the demonstrations")
    encoded = [
        [encode(chat, conversation) for conversation in phase] for phase in (right, imperfect)
    ]
    model = build_model(config.policy, tokenizer, config.run.seed)
    imitate(model, encoded, settings, config.run.seed, tokenizer.pad_token_id, report)
    return model, tokenizer


def _played(
    task: Task, kind: str, settings: WarmStartConfig, rng: random.Random, report: Report
) -> list[list[Piece]]:
    """Return the demonstrations of one phase."""
    found: list[list[Piece]] = []
    for conversation in conversations(task, settings, rng):
        if len(found) % TOLD_EVERY == 0:
            report(f"{len(found):,} of {settings.demonstrations:,} {kind} demonstrations")
        found.append(conversation)
    return found


def imitate(
    model: Any,
    phases: Sequence[list[Demonstration]],
    settings: WarmStartConfig,
    seed: int,
    pad_id: int,
    report: Report,
) -> None:
    """Train on next-token cross-entropy, with linear warm-up and decay.

    The first `flawless_share` of the steps uses the first of the two phases.
    """
    rng = random.Random(f"{seed}:order")
    optimizers = make_optimizers(model, settings.lr)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_rate, settings.steps))
        for optimizer in optimizers
    ]
    model.train()
    for step in range(settings.steps):
        data = phases[step >= settings.flawless_share * settings.steps]
        batch = rng.sample(data, min(settings.batch_size, len(data)))
        loss = backward(model, batch, pad_id)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        made_progress(f"step {step + 1} of {settings.steps} of the warm start")
        report(f"step {step + 1} of {settings.steps}, loss {loss:.2f}")
    model.eval()


def make_optimizers(model: Any, lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices, AdamW for embeddings and norms."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=MUON_RATE_RATIO * lr, weight_decay=0.0),
        torch.optim.AdamW(others, lr=lr, weight_decay=0.01),
    ]


def _rate(steps: int, step: int) -> float:
    warmup = max(1, steps // 10)
    return min((step + 1) / warmup, max(0.05, (steps - step) / max(1, steps)))


def backward(model: Any, batch: list[Demonstration], pad_id: int) -> float:
    """Add the gradient of the batch's mean loss per trained token; return that loss.

    Conversations of similar length share a forward, to reduce padding; the batch is mixed.
    """
    learnt, total = sum(sum(item.learn) for item in batch), 0.0
    lengths = [len(item.ids) for item in batch]
    for indices in microbatches(lengths, max(FORWARD_TOKENS, *lengths)):
        ids, labels = collate([batch[index] for index in indices], pad_id)
        loss = model(input_ids=ids, labels=labels, num_items_in_batch=learnt).loss
        loss.backward()
        total += float(loss.detach())
    return total


def collate(batch: list[Demonstration], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return ids `[B, T]` and labels `[B, T]`, right-padded; labels are -100 where not trained."""
    width = max(len(item.ids) for item in batch)
    ids = torch.full((len(batch), width), pad_id)
    labels = torch.full((len(batch), width), IGNORE)
    for row, item in enumerate(batch):
        tokens = torch.tensor(item.ids)
        ids[row, : len(item.ids)] = tokens
        labels[row, : len(item.ids)] = torch.where(torch.tensor(item.learn), tokens, IGNORE)
    return ids, labels
