"""A served trainer reports its progress, as every actor with long calls does."""

from __future__ import annotations

from typing import Any

import numpy as np

from composer_mesh.mesh.progress import PROGRESS, Report
from composer_mesh.plugins.tinker.models.client_trainer import ClientTrainer
from composer_mesh.plugins.tinker.models.messages import Datum, ModelSpec, TrainCall
from composer_mesh.plugins.tinker.models.trained_weights import AdapterWeights


def test_a_served_trainer_reports_each_batch_of_its_clients(build_model: Any) -> None:
    base = build_model(5)
    trainer = ClientTrainer(base, AdapterWeights(base, 32.0), 4096, 16)
    trainer.open("a", ModelSpec(rank=4, seed=1), None)
    inputs = {"target_tokens": np.full(9, 4), "weights": np.ones(9, np.float32)}
    data = (Datum(np.full(9, 3), inputs),)
    before = PROGRESS.count
    trainer.execute([TrainCall("a", 0, "forward_backward", data, "cross_entropy")])
    assert PROGRESS.count > before
    assert Report(**PROGRESS.report()).last == "a batch of 1 clients' rows"
