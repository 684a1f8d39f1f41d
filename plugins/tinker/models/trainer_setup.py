"""Builds the trainer of clients' models: the policy whole on one rank, sharded over several."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.models.policy import empty_model, load_model
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.trained_model import frozen_model, trained_model
from composer_mesh.configs.schema import Config
from composer_mesh.plugins.tinker.models.adapter_layers import ActiveAdapters, adapt
from composer_mesh.plugins.tinker.models.client_trainer import ClientTrainer
from composer_mesh.plugins.tinker.models.trained_weights import (
    AdapterWeights,
    FullWeights,
    ShardedWeights,
    Weights,
)


def make_trainer(config: Config, folder: Path, ranks: Ranks) -> ClientTrainer:
    """Return a trainer without models. All ranks make theirs together. Raises `UnfitModel`."""
    base, weights = place_policy(config, folder, ranks)
    tokens, models = config.trainer.microbatch_tokens, config.serve.batched_models
    return ClientTrainer(base, weights, tokens, models, ranks)


def place_policy(config: Config, folder: Path, ranks: Ranks) -> tuple[Any, Weights]:
    """Return the policy on this rank, and how models' numbers enter it."""
    alpha = config.serve.lora_alpha
    if ranks.size == 1:
        base = load_model(folder).to(ranks.device)
        LanguageModel(base).check_head()
        LanguageModel(base).check_rows()
        return base, FullWeights(base) if config.serve.full_weights else AdapterWeights(base, alpha)
    if config.serve.full_weights:
        base = trained_model(config, folder, ranks)
        return base, ShardedWeights(base, ranks)
    active = ActiveAdapters(1.0)
    base = frozen_model(config, folder, ranks, adapt=partial(adapt, active=active))
    return base, AdapterWeights(empty_model(folder), alpha, (base, active))
