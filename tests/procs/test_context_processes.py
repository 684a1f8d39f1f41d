"""Real trainer processes that divide positions train a step as one rank does."""

from __future__ import annotations

from pathlib import Path

import contexts
import pytest

from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.rollouts.traces import TurnDivergences
from composer_mesh.services.pool.process_placement import ProcessPlacement
from composer_mesh.services.training.rank_processes import TrainerRanks
from composer_mesh.services.training.step import MeshTraining


async def test_processes_of_a_context_train_a_step_as_one_rank_does(
    host: MeshHost, tmp_path: Path
) -> None:
    case, kept = "divided keys", list[TurnDivergences]()
    step = contexts.batches(contexts.write_policies(tmp_path)[case])[0]
    learner = Learner(contexts.config(case, tmp_path), tmp_path / case, Ranks())
    alone = learner.train(step, learner.own_teacher_outputs(step))
    config = contexts.config(case, tmp_path, ranks=2, context=2)
    ranks = TrainerRanks(config, host, lambda _: ProcessPlacement())
    await ranks.start()
    await ranks.load(tmp_path / case)
    training = MeshTraining(config, lambda: ranks.all, None, lambda _, found: kept.extend(found))
    metrics = await training.train(step)
    losses = [name for name in alone if name.startswith("loss/")]
    assert [metrics[name] for name in losses] == pytest.approx(
        [alone[name] for name in losses], rel=1e-5, abs=1e-5
    )
    assert sorted((one.trace_id, one.turn) for one in kept) == sorted(
        (view.trace_id, view.turn) for view in step.views
    )
