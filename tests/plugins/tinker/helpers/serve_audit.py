"""Audits a training server: each model's logged changes are executed again from its creation."""

import sqlite3
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.configs.schema import Config
from composer_mesh.plugins.tinker.models.client_trainer import make_trainer
from composer_mesh.plugins.tinker.models.model_state import read_state
from composer_mesh.plugins.tinker.server import operation_log as log
from composer_mesh.plugins.tinker.server.requests import call_of, payload_of
from composer_mesh.plugins.tinker.server.training_data import DataLimits


def audit(
    output: Path,
    config: Config,
    policy: Path,
    saved: Mapping[str, str],
    ranks: Ranks | None = None,
) -> dict[str, list[str]]:
    """Return the kinds of each model's changes; `saved` are paths of whole states by model.

    `ranks` are those of a server with several, of which each calls this. Raises AssertionError
    unless each saved state is, bit for bit, that of its changes.
    """
    torch.set_num_threads(1)
    trainer = make_trainer(config, policy, ranks or Ranks())
    limits = DataLimits(trainer.vocabulary, config.policy.max_context, 1024, 100)
    rows = sqlite3.connect(output / "operations.sqlite")
    found, kinds = log.read_records(rows), {}
    for name, path in saved.items():
        trainer.open(name, found.models[name].spec, None)
        changes = log.changes_after(rows, name, 0)
        assert [one.position for one in changes] == [*range(len(changes))]
        for position, change in enumerate(changes):
            payload = payload_of(change.request.kind, change.request.body, limits)
            call = call_of(change.request.kind, name, payload, position)
            (result,) = trainer.execute([replace(call, shape=change.shape)])
            assert not result.error
        stored = read_state(output / found.saved[path].file).tensors
        own = trainer.models[name].stored().tensors
        assert own.keys() == stored.keys()
        if ranks is None or ranks.rank == 0:  # the one that has all numbers
            assert all(torch.equal(value, stored[key]) for key, value in own.items()), name
        kinds[name] = [one.request.kind for one in changes]
    return kinds
