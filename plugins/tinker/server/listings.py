"""What clients read about the server, their models and what they saved, as JSON values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from composer_mesh.plugins.tinker.server.records import Model, Sampler, Saved
from composer_mesh.plugins.tinker.server.registry import Registry
from composer_mesh.plugins.tinker.server.server import Served


def capabilities(served: Served) -> Mapping[str, Any]:
    """Return the one model that is served."""
    about = {
        "model_name": served.base_model,
        "max_context_length": served.data.context,
        "trainable": True,
        "sampleable": True,
    }
    return {"supported_models": [about]}


def model_info(model: Model, served: Served) -> Mapping[str, Any]:
    """Return what `get_info` tells of a model."""
    about = {"model_name": served.base_model, "tokenizer_id": served.tokenizer or None}
    return {
        "type": "get_info",
        "model_data": about,
        "model_id": model.id,
        "model_name": served.base_model,
        **_lora(model.spec.rank),
    }


def _lora(rank: int) -> Mapping[str, Any]:
    return {"is_lora": rank > 0, "lora_rank": rank or None}


def weights_info(saved: Saved, served: Served) -> Mapping[str, Any]:
    """Return how a model has to be created that loads saved weights."""
    spec = saved.spec
    return {
        "base_model": served.base_model,
        **_lora(spec.rank),
        "train_unembed": spec.train_unembed,
        "train_mlp": spec.train_mlp,
        "train_attn": spec.train_attn,
    }


def sampler(found: Sampler, served: Served) -> Mapping[str, Any]:
    """Return what a sampler draws from."""
    return {
        "sampler_id": found.id,
        "base_model": served.base_model,
        "model_path": found.path or None,
    }


def session(name: str, client: str, registry: Registry) -> Mapping[str, Any]:
    """Return the models and samplers of a session."""
    models = [one.id for one in registry.models(client) if one.session == name]
    samplers = [one.id for one in registry.samplers() if one.session == name]
    return {"training_run_ids": models, "sampler_ids": samplers}


def checkpoint(saved: Saved) -> Mapping[str, Any]:
    """Return saved weights as lists show them."""
    return {
        "checkpoint_id": saved.checkpoint_id,
        "checkpoint_type": saved.kind,
        "time": _time(saved.created),
        "tinker_path": saved.path,
        "size_bytes": saved.bytes,
        "public": False,
        "user_metadata": json.loads(saved.metadata) if saved.metadata else None,
        "expires_at": None if saved.expires is None else _time(saved.expires),
    }


def training_run(model: Model, saved: Sequence[Saved], served: Served) -> Mapping[str, Any]:
    """Return a model as lists show it, with what it saved last."""
    last = {kind: next((one for one in saved if one.kind == kind), None) for kind in _KINDS}
    training, sampling = last["training"], last["sampler"]
    return {
        "training_run_id": model.id,
        "base_model": served.base_model,
        "model_owner": model.client,
        **_lora(model.spec.rank),
        "corrupted": False,
        "last_request_time": _time(model.used),
        "last_checkpoint": None if training is None else checkpoint(training),
        "last_sampler_checkpoint": None if sampling is None else checkpoint(sampling),
        "user_metadata": {key: str(value) for key, value in json.loads(model.metadata).items()},
    }


_KINDS = ("training", "sampler")


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
