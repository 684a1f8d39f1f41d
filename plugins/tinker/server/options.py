"""Options of a training server: where it listens, its folder, the keys of its clients."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from composer_mesh.actors.engines.vllm_settings import (
    LORA_SLOTS,
    VllmUnavailable,
    check_vllm_fits,
    check_vllm_installed,
)
from composer_mesh.configs.hub import id_of
from composer_mesh.configs.paths import pinned_as
from composer_mesh.configs.regular_files import read_regular
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.open_folder import write_whole
from composer_mesh.services.web.options import (
    SHORTEST_TOKEN,
    ListenOptions,
    ServeRefused,
    check_installed,
    checked_token,
)

NEEDED = {"google.protobuf": "protobuf"}
NOTED, LONGEST_NOTE = "serve.json", 1_000_000
"""What the states in a server's folder depend on."""

NAMES = {"ranks": "number of trainer.ranks"}
PREFIX = "tml-"
"""What SDKs want a key to begin with."""


def checked_keys(options: ListenOptions, names: Sequence[str]) -> list[str]:
    """Return the keys of clients, from the environment variables that hold them.

    Raises ServeRefused for an address that may not be listened on, none beyond loopback, and keys
    that are short, equal, or that SDKs refuse to send. No process of the server inherits them.
    """
    if not names:
        checked_token(options, None)
    keys = [checked_token(options, name, dict(os.environ)) for name in names]
    for name, key in zip(names, keys, strict=True):
        if not key.startswith(PREFIX):
            raise ServeRefused(
                f"--key-env is {name}, whose key does not begin with {PREFIX!r} as SDKs want it: "
                f"set it to {PREFIX} and at least {SHORTEST_TOKEN - len(PREFIX)} other characters"
            )
        if keys.count(key) > 1:
            raise ServeRefused(f"--key-env is {name}, whose key another client has: choose another")
    for name in names:
        del os.environ[name]
    return keys


def check_serves(config: Config) -> None:
    """Raise ServeRefused where packages are missing, or the config asks for what is not served."""
    check_installed(NEEDED, "serve")
    trainer = config.trainer
    others = {
        "trainer.context_parallel": (trainer.context_parallel, 1),
        "trainer.expert_parallel": (trainer.expert_parallel, 1),
        "trainer.compute_dtype": (trainer.compute_dtype, "float32"),
        "trainer.compile": (trainer.compile, False),
        "trainer.optimizer": (trainer.optimizer, "adamw"),
        "trainer.optimizer_offload": (trainer.optimizer_offload, False),
        "trainer.packing": (trainer.packing, False),
        "trainer.lora": (trainer.lora, None),
        "trainer.backend": (trainer.backend, None),
        "generator.quantization": (config.generator.quantization, "none"),
        "cluster.kind": (config.cluster.kind, "local"),
        "placement.colocate": (config.placement.colocate, False),
    }
    for key, (value, needed) in others.items():
        if value != needed:
            raise ServeRefused(
                f"{key} is {value!r}, with which clients' models are not served: set it to "
                f"{needed!r}"
            )
    _check_ranks(config)
    if config.generator.engine == "vllm":
        _check_vllm(config)


def _check_ranks(config: Config) -> None:
    """Refuse weights sharded over one rank, and all weights trained by several without it."""
    trainer = config.trainer
    if trainer.ranks == 1 and trainer.sharded:
        raise ServeRefused(
            f"trainer.sharding is {trainer.sharding!r} but trainer.ranks is 1, which has nothing "
            "to shard for clients: set it to 'auto', or raise trainer.ranks"
        )
    if trainer.ranks > 1 and config.serve.full_weights and not trainer.sharded:
        raise ServeRefused(
            f"serve.full_weights is true and trainer.ranks is {trainer.ranks}, but "
            f"trainer.sharding is {trainer.sharding!r}, where ranks have nothing to divide: set it "
            "to 'auto'"
        )


def _check_vllm(config: Config) -> None:
    serve = config.serve
    if serve.full_weights:
        raise ServeRefused(
            "generator.engine is 'vllm', which serves adapters, but serve.full_weights is true: "
            "set it to 'embedded'"
        )
    if serve.max_rank > LORA_SLOTS[-1]:
        raise ServeRefused(
            f"serve.max_rank is {serve.max_rank}, but vLLM serves adapters up to rank "
            f"{LORA_SLOTS[-1]}: lower it, or set generator.engine to 'embedded'"
        )
    try:
        check_vllm_fits(config)
        check_vllm_installed(config)
    except VllmUnavailable as error:
        raise ServeRefused(str(error)) from error


def check_same_policy(config: Config, output: Path) -> None:
    """Note what states in a folder depend on; raise ServeRefused where it was other before."""
    now = {
        "policy": config.policy.model_dump(mode="json"),
        "seed": config.run.seed,
        "microbatch_tokens": config.trainer.microbatch_tokens,
        "ranks": config.trainer.ranks,
        "lora_alpha": config.serve.lora_alpha,
        "full_weights": config.serve.full_weights,
    }
    before = _noted(output)
    if before is None:
        write_whole(output / NOTED, json.dumps(now, indent=2).encode())
        return
    for key, value in now.items():
        if before.get(key) != value:
            raise ServeRefused(
                f"{output} has models of another {NAMES.get(key, key)}: serve the config that they "
                "were made with, or name another --output"
            )


def with_noted_commit(config: Config, output: Path) -> Config:
    """Return the config with the commit of its policy that models in a folder were made with."""
    path = (_noted(output) or {}).get("policy", {}).get("path")
    if not isinstance(path, str):
        return config
    policy = config.policy.model_copy(update={"path": path})
    return pinned_as(config, config.model_copy(update={"policy": policy}))


def _noted(output: Path) -> dict[str, Any] | None:
    if not (output / NOTED).exists():
        return None
    found: dict[str, Any] = json.loads(read_regular(output / NOTED, LONGEST_NOTE))
    return found


def tokenizer_of(config: Config, options: ListenOptions, folder: Path) -> str:
    """Return what clients load their tokenizer from: the policy's id on a hub, or its folder for
    clients of this machine."""
    if config.serve.tokenizer:
        return config.serve.tokenizer
    named = id_of(config.policy.path)
    if named is not None and not named.part:
        return named.repo
    return str(folder.absolute()) if options.is_loopback else ""


def base_model_of(config: Config) -> str:
    """Return the name by which clients ask for the policy."""
    named = id_of(config.policy.path)
    return config.serve.base_model or (config.run.name if named is None else named.repo)
