"""What each of two trainer ranks does with the optimizers that shard their state."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "helpers"))

import optimizer_runs as runs

from composer_mesh.actors.checkpoints.state import ShardReader, write_shards
from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.models.backend import optimizers_of
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.rollouts.batches import StepBatch

OFFLOADS = (False, True)


def saved(config: Any, folder: Path, ranks: Ranks, steps: list[StepBatch], checkpoint: Path) -> Any:
    """Save after two steps and go on: the state then, and the weights after the rest."""
    learner = Learner(config, folder, ranks)
    runs.trained(learner, steps[:2])
    runs.save(learner, ranks, checkpoint)
    return {"state": runs.state_of(learner), "last": runs.trained(learner, steps[2:])}


def resumed(
    config: Any, folder: Path, ranks: Ranks, steps: list[StepBatch], checkpoint: Path
) -> Any:
    """Go on from a checkpoint: the state that it has, and the weights after the steps."""
    learner = Learner(config, folder, ranks)
    learner.restore(checkpoint)
    return {"state": runs.state_of(learner), "last": runs.trained(learner, steps)}


def name_of(optimizer: str, ranks: int, offload: bool) -> str:
    return f"{optimizer}-{ranks}-{'offloaded' if offload else 'kept'}"


def rowless(ranks: Ranks, folder: Path) -> bool:
    """Whether the state of a weight of one row, of which a rank has none, is read as written."""

    def updated(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        whole = torch.randn(1, 8192)
        weight = nn.Parameter(distribute_tensor(whole, ranks.mesh(), [Shard(0)]))
        weight.grad = distribute_tensor(torch.randn(1, 8192), ranks.mesh(), [Shard(0)])
        (optimizer,) = optimizers_of(runs.config(optimizer="adamw_8bit").trainer, {"w": weight})
        optimizer.step()
        return optimizer, weight

    one, other = updated(0), updated(1)
    written, read = (optimizer.stored(weight) for optimizer, weight in (one, other))
    differed = not runs.equal(runs.complete(written), runs.complete(read))
    write_shards(folder, written, ranks.background_group)
    ShardReader(folder).read(read)
    return differed and runs.equal(runs.complete(written), runs.complete(read))


def muon_differs(ranks: Ranks) -> float:
    """By how much Muon of sharded rows, of ranks without any too, differs from that of matrices."""
    shapes = [(8, 6), (6, 8), (1, 5), (7, 3), (3, 16)]
    torch.manual_seed(0)
    wholes = {f"layers.{n}.w": nn.Parameter(torch.randn(one)) for n, one in enumerate(shapes)}
    mesh = ranks.mesh()
    rows = {
        name: nn.Parameter(distribute_tensor(one.detach(), mesh, [Shard(0)]))
        for name, one in wholes.items()
    }
    trainer = runs.config(optimizer="muon").trainer
    optimizers = [optimizers_of(trainer, one)[0] for one in (wholes, rows)]
    for _ in range(3):
        for name, one in wholes.items():
            one.grad = torch.randn(one.shape)
            rows[name].grad = distribute_tensor(one.grad, mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
    found = runs.complete(rows)
    return max(float((found[name] - one).abs().max()) for name, one in wholes.items())


def both(rank: int, rendezvous: Path, folder: Path, steps: list[StepBatch], root: Path) -> None:
    """What each of two processes does, in the same order; the results lie in `root` then."""
    torch.set_num_threads(1)
    ranks = Ranks.connect(rank, 2, rendezvous, 60.0)
    found: dict[str, Any] = {}
    for optimizer in ("adamw", "adamw_8bit", "muon"):
        for offload in OFFLOADS:
            config = runs.config(optimizer=optimizer, optimizer_offload=offload, ranks=2)
            name, alone = (name_of(optimizer, count, offload) for count in (2, 1))
            found[name] = saved(config, folder, ranks, steps, root / name)
            found[f"{name} again"] = resumed(config, folder, ranks, steps[2:], root / name)
            found[f"{name} from one"] = resumed(config, folder, ranks, steps[2:], root / alone)
    found["muon"] = muon_differs(ranks)
    found["rowless"] = rowless(ranks, root / "rowless")
    torch.save(found, root / f"rank-{rank}.pt")
