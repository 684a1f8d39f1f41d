"""Work on several ranks: none of them is late while another one, for which it waits, moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from fake_trainer import batch
from scripted_work import NOW_S, Worker, actor, moves, stands_still

from composer_mesh.actors.trainer import TrainReply
from composer_mesh.mesh.supervision import DeadlineExceeded
from composer_mesh.services.training.rank_processes import TrainerRanks
from composer_mesh.services.training.step import MeshTraining


def ranks_of(result: Any, slow: bool) -> list[Any]:
    """Two ranks, of which the second one moves if it is only `slow`, and ends last."""
    still = [stands_still() for _ in range(10)]
    moving = [moves() if slow else stands_still() for _ in range(40)]
    return [
        actor(Worker(reports, result), name=f"trainer-{rank}")
        for rank, reports in enumerate((still, moving))
    ]


def config_of(build_config: Any) -> Any:
    return build_config(run={"deadline_s": 1e-3}, trainer={"ranks": 2})


@pytest.mark.parametrize("slow", [True, False])
async def test_a_step_waits_for_a_slow_rank_and_not_for_ranks_that_all_stand_still(
    build_config: Any, slow: bool
) -> None:
    ranks = ranks_of(TrainReply({"loss/total": 1.0}, {}), slow)
    training = MeshTraining(config_of(build_config), lambda: ranks, None)
    training._deadline_s = NOW_S
    if slow:
        assert (await training.train(batch(0)))["loss/total"] == 1.0
    else:
        with pytest.raises(DeadlineExceeded, match=r"trainer-\d.train made no progress"):
            await training.train(batch(0))


async def test_a_checkpoint_waits_for_a_slow_rank_too(build_config: Any) -> None:
    processes = TrainerRanks(config_of(build_config), cast(Any, None), cast(Any, None))
    processes._deadline_s = NOW_S
    processes.all = ranks_of(None, slow=True)
    await processes.save(Path("/nowhere"), export=False)
