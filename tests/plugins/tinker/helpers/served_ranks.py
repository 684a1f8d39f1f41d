"""Ranks of a training server without Monarch: what they make of clients' calls.

The same functions execute in the test's own process, which is one rank, and in several processes.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "unit" / "helpers"))

import learning
from serve_audit import audit

from composer_mesh.actors.models.ranks import Ranks, RanksLost
from composer_mesh.actors.models.sharding import local
from composer_mesh.configs.schema import Config
from composer_mesh.plugins.tinker.models.client_trainer import (
    ClientTrainer,
    make_trainer,
    place_policy,
)
from composer_mesh.plugins.tinker.models.messages import (
    AdamParams,
    Datum,
    ModelSpec,
    TrainCall,
)

SECTIONS: dict[str, dict[str, Any]] = {
    "run": {"name": "served-ranks", "seed": 3, "steps": 1},
    **{name: learning.SECTIONS[name] for name in ("data", "environment", "policy")},
    "trainer": {"microbatch_tokens": 200},
}
DEADLINE_S = 600.0
ADAM = AdamParams(1e-2, weight_decay=0.1, grad_clip_norm=1.0)
ADAM_OF_ALL = AdamParams(3e-4, eps=1e-8, weight_decay=0.1, grad_clip_norm=1.0)
"""AdamW makes steps of the learning rate of gradients that are rounding alone, up to `eps`."""
PARTIAL = ModelSpec(3, seed=7, train_attn=False, train_mlp=False)
"""Only the head is trained: no layer has a backward."""


def config_of(ranks: int, **trainer: Any) -> Config:
    own = {**SECTIONS["trainer"], "ranks": ranks, **trainer}
    return Config.model_validate({**SECTIONS, "trainer": own})


def datum(seed: int, length: int, k: int = 0, **extra: float) -> Datum:
    rng = np.random.default_rng(seed)
    shape = (length, k) if k else (length,)
    inputs: dict[str, Any] = {"target_tokens": rng.integers(3, 300, shape)}
    inputs["weights"] = rng.normal(size=shape).astype(np.float32)
    inputs |= {name: np.full(length, value, np.float32) for name, value in extra.items()}
    return Datum(rng.integers(3, 300, length), inputs)


def trained(
    model: str, position: int, data: list[Datum], loss: str = "cross_entropy", **more: Any
) -> TrainCall:
    return TrainCall(model, position, "forward_backward", tuple(data), loss, **more)


PARTS = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(3))
"""A tensor of each of three ranks, whose numbers two or three ranks do not divide evenly."""
ROWS = {"a": 1, "b": 2, "c": 3, "d": 5, "e": 1}
"""Rows of each model's calls: one, fewer than ranks, as many, uneven ones."""


def calls_of(step: int) -> list[TrainCall]:
    """Return the calls of a step: models of different rows, then each model's optimizer step."""
    found = []
    for number, (name, rows) in enumerate(ROWS.items()):
        seed = 1000 * step + 100 * number
        data = [datum(seed + row, 5 + 3 * row + number) for row in range(rows)]
        found.append(trained(name, 2 * step, data))
    return found + [TrainCall(name, 2 * step + 1, "optim_step", adam=ADAM) for name in ROWS]


def states_of(trainer: ClientTrainer) -> dict[str, dict[str, torch.Tensor]]:
    """Return copies of all that each model has."""
    return {
        name: {key: value.clone() for key, value in state.stored().tensors.items()}
        for name, state in trainer.models.items()
    }


def opened(config: Config, folder: Path, ranks: Ranks) -> ClientTrainer:
    trainer = make_trainer(config, folder, ranks)
    for number, name in enumerate(ROWS):
        trainer.open(name, ModelSpec(4, seed=number), None)
    return trainer


def five_steps(config: Config, folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Five steps of all models at once: results, what all models are then, and their log-probs."""
    trainer = opened(config, folder, ranks)
    results = [one for step in range(5) for one in trainer.execute(calls_of(step))]
    forwards = [replace(one, kind="forward", position=10) for one in calls_of(5)[: len(ROWS)]]
    last = trainer.execute(forwards)
    return {"results": results, "states": states_of(trainer), "forward": last}


def one_call(
    config: Config, folder: Path, ranks: Ranks, call: TrainCall, spec: ModelSpec
) -> dict[str, Any]:
    """One call of a model alone, and its step."""
    trainer = make_trainer(config, folder, ranks)
    trainer.open(call.model, spec, None)
    (forward,) = trainer.execute([replace(call, kind="forward")])
    found = trainer.execute([call, TrainCall(call.model, 1, "optim_step", adam=ADAM)])
    return {"results": [forward, *found], "states": states_of(trainer)}


def replayed(config: Config, folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Each model's changes again, alone, in the shapes that they had beside the others."""
    first, again = opened(config, folder, ranks), opened(config, folder, ranks)
    results = []
    for step in range(3):
        calls = calls_of(step)
        found = first.execute(calls)
        repeated = [replace(one, shape=r.shape) for one, r in zip(calls, found, strict=True)]
        both = [(r, again.execute([one])[0]) for r, one in zip(found, repeated, strict=True)]
        results.append(both)
    return {"first": states_of(first), "again": states_of(again), "results": results}


def saved(config: Config, folder: Path, ranks: Ranks, place: Path) -> dict[str, Any]:
    """Three steps; a save, a closed model that comes back, one that takes another's weights."""
    trainer = opened(config, folder, ranks)
    for step in range(2):
        trainer.execute(calls_of(step))
    before = states_of(trainer)
    trainer.save("d", place / "d")
    trainer.close("d")
    ranks.gather("")  # files are written by rank 0
    trainer.open("d", ModelSpec(4, seed=9), place / "d")
    after = states_of(trainer)
    (told,) = trainer.execute([TrainCall("a", 4, "save", path=str(place / "a"), optimizer=True)])
    ranks.gather("")
    loads = TrainCall("b", 4, "load_weights", path=str(place / "a"), optimizer=True)
    lost = replace(loads, model="c", path=str(place / f"only-{ranks.rank}"))
    if ranks.rank == 0:
        trainer.save("c", place / "only-0")
    loaded, failed = trainer.execute([loads, lost])
    return {
        "before": before,
        "after": after,
        "told": told,
        "loaded": loaded,
        "failed": failed,
        "states": states_of(trainer),
        "positions": {name: one.position for name, one in trainer.models.items()},
    }


def whole_weights(
    config: Config, folder: Path, ranks: Ranks, channels: TrainCall, place: Path
) -> dict[str, Any]:
    """All weights of one model: five steps, of which the last two come after a save.

    Then a call whose gradient is not finite, and a gradient that is kept in a file.
    """
    config = config.model_copy(
        update={"serve": config.serve.model_copy(update={"full_weights": True})}
    )
    trainer, results = make_trainer(config, folder, ranks), []
    trainer.open("x", ModelSpec(0), None)
    again = make_trainer(config, folder, ranks)
    for step in range(5):
        data = [datum(100 * step + row, 6 + 2 * row) for row in range(1 + step % 3)]
        call = trained("x", 2 * step, data)
        if step == 2:
            call = replace(channels, position=2 * step)
        (found,) = trainer.execute([call])
        results.append(found)
        if step == 3:
            trainer.save("x", place / "all")
            ranks.gather("")
            again.open("x", ModelSpec(0), place / "all")
        calls = [TrainCall("x", 2 * step + 1, "optim_step", adam=ADAM_OF_ALL)]
        results += trainer.execute(calls)
        if step == 3:
            again.execute(calls)
        if step == 4:
            again.execute([replace(call, shape=found.shape), *calls])
    bad = Datum(datum(1, 7).tokens, {**datum(1, 7).inputs, "weights": np.full(7, np.inf)})
    failed, forward = trainer.execute(
        [trained("x", 10, [bad]), replace(trained("x", 10, [datum(3, 9)]), kind="forward")]
    )
    fresh = make_trainer(config, folder, ranks)
    fresh.open("x", ModelSpec(0), None)
    loads = TrainCall("x", 0, "load_weights", path=str(place / "all"), optimizer=True)
    return {
        "results": [*results, forward],
        "failed": failed,
        "states": states_of(trainer),
        "again": states_of(again),
        "loaded": [*fresh.execute([loads]), *fresh.execute([trained("x", 1, [datum(2, 9)])])],
        "kept": trainer.models["x"].weights.numel() / trainer.models["x"].count,
    }


def kept(config: Config, folder: Path, ranks: Ranks) -> float:
    """Return the share of the policy's weights that this rank keeps between forwards."""
    base, _ = place_policy(config, folder, ranks)
    whole = sum(one.numel() for one in base.parameters())
    return sum(local(one).numel() for one in base.parameters()) / whole


class FailsOn(dict[str, Any]):
    """Inputs or options that cannot be read on one rank."""

    def __init__(self, values: Any, fails: bool) -> None:
        super().__init__(values)
        self._fails = fails

    def __getitem__(self, name: str) -> Any:
        if name == "weights":
            self._check()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._check()
        return super().get(name, default)

    def _check(self) -> None:
        if self._fails:
            raise RuntimeError("not readable here")


def faults(config: Config, folder: Path, ranks: Ranks, rank: int) -> dict[str, Any]:
    """Calls of one model that fail on one rank or on all, each beside a good one of another."""
    trainer, found, last = opened(config, folder, ranks), {}, ranks.rank == rank
    good = [datum(n, 7) for n in range(4)]
    sampled = [datum(n, 7, advantages=1.0, logprobs=-2.0) for n in range(4)]
    far = [*good[:3], Datum(np.full(7, 4000), good[3].inputs)]
    targets = [*good[:3], Datum(good[3].tokens, {"target_tokens": np.full(7, 4000)})]
    long = [*good[:3], Datum(good[3].tokens, {**good[3].inputs, "weights": np.zeros(9)})]
    nan = [*good[:3], Datum(good[3].tokens, {**good[3].inputs, "weights": np.full(7, np.nan)})]
    unread = [*good[:3], Datum(good[3].tokens, FailsOn(good[3].inputs, last))]
    cases = {
        "ids": trained("d", 0, far),
        "targets": trained("d", 0, targets),
        "shape": trained("d", 0, long),
        "nan": trained("d", 0, nan),
        "unread": trained("d", 0, unread),
        "loss": trained("d", 0, sampled, "dro", options=FailsOn({}, last)),
    }
    for number, (name, call) in enumerate(cases.items()):
        beside = trained("b", number, good, loss="cross_entropy")
        found[name] = trainer.execute([call, beside])
    found["after"] = trainer.execute([trained("d", 0, good)])
    return {"results": found, "states": states_of(trainer)}


def work(ranks: Ranks, folder: Path, root: Path, channels: TrainCall) -> dict[str, Any]:
    """Return all that a rank, or the only one, makes of the same calls."""
    config, replicated = config_of(ranks.size), config_of(ranks.size, sharding="none")
    one_row = trained("x", 0, [datum(1, 9)])
    return {
        "sum": ranks.ordered_sum(PARTS[ranks.rank]),
        "kept": kept(config, folder, ranks),
        "kept of replicated": kept(replicated, folder, ranks),
        "whole": whole_weights(config, folder, ranks, channels, root / f"whole-{ranks.size}"),
        "steps": five_steps(config, folder, ranks),
        "replicated": five_steps(replicated, folder, ranks),
        "small": five_steps(config_of(ranks.size, microbatch_tokens=64), folder, ranks),
        "channels": one_call(config, folder, ranks, channels, ModelSpec(4)),
        "cut channels": one_call(
            config_of(ranks.size, microbatch_tokens=64), folder, ranks, channels, ModelSpec(4)
        ),
        "head": one_call(config, folder, ranks, one_row, PARTIAL),
        "targets": one_call(
            config,
            folder,
            ranks,
            trained("x", 0, [datum(n, 9, k=3) for n in range(3)]),
            ModelSpec(2),
        ),
        "replayed": replayed(config, folder, ranks),
        "saved": saved(config, folder, ranks, root / f"states-{ranks.size}"),
        "faults": faults(config, folder, ranks, ranks.size - 1),
        "faults of 0": faults(config, folder, ranks, 0),
    }


def both(rank: int, rendezvous: Path, folder: Path, root: Path, channels: TrainCall) -> None:
    """What each of two processes does, in the same order; the results lie in `root` then."""
    torch.set_num_threads(1)
    ranks = Ranks.connect(rank, 2, rendezvous, DEADLINE_S)
    torch.save(work(ranks, folder, root, channels), root / f"rank-{rank}.pt")


def three(rank: int, rendezvous: Path, folder: Path, root: Path, channels: TrainCall) -> None:
    """What each of three processes does: more ranks than most models have rows."""
    torch.set_num_threads(1)
    ranks, config = Ranks.connect(rank, 3, rendezvous, DEADLINE_S), config_of(3)
    found = {
        "sum": ranks.ordered_sum(PARTS[rank]),
        "steps": five_steps(config, folder, ranks),
        "channels": one_call(config, folder, ranks, channels, ModelSpec(4)),
    }
    torch.save(found, root / f"rank-{rank}-of-3.pt")


class EndsHere(dict[str, float]):
    """Options of a loss that end the process which reads them."""

    def get(self, name: str, default: Any = None) -> Any:
        os._exit(0)


def left_alone(rank: int, rendezvous: Path, folder: Path, root: Path) -> None:
    """Rank 1 ends in the middle of a call: what becomes of the call on rank 0."""
    torch.set_num_threads(1)
    ranks = Ranks.connect(rank, 2, rendezvous, DEADLINE_S)
    trainer = opened(config_of(2), folder, ranks)
    sampled = [datum(n, 7, advantages=1.0, logprobs=-2.0) for n in range(2)]
    options = EndsHere() if rank == 1 else {}
    try:
        results = trainer.execute([trained("b", 0, sampled, "dro", options=options)])
        (root / "told").write_text(f"answered: {results[0].error}")
    except RanksLost as lost:
        (root / "told").write_text(f"lost: {lost}")


def audited(
    rank: int, rendezvous: Path, output: Path, config: Config, folder: Path, saved: dict[str, str]
) -> None:
    """Audit a server of two ranks, in each of two processes."""
    torch.set_num_threads(1)
    audit(output, config, folder, saved, Ranks.connect(rank, 2, rendezvous, DEADLINE_S))
