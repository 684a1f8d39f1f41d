"""The model card of a checkpoint: README.md, from the files of its run.

Texts of users and files are escaped; addresses, paths and keys of the run's config are left out.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w

from composer_mesh.actors.checkpoints.folder import FOLDER, Checkpoint
from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.hub import GGUF, HubId, id_of
from composer_mesh.configs.installed import installed_version
from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.services.directory.report import (
    EVALUATIONS_FILE,
    METRICS_FILE,
    Evaluation,
    read_evaluations,
    read_metrics,
    summarize,
)

CONFIG_FILE = "config.toml"
SHOWN = ("loss", "advantage", "trainer", "schedule", "generator", "eval", "sft")
"""Sections of the config whose settings are in a card."""
HIDDEN = frozenset(
    {"backend", "engine_args", "options", "kwargs", "import_path", "path", "cache_dir"}
)
PACKAGES = ("composer-mesh", "torch", "transformers")
_MARKS = re.compile(r"([\\`*_{}\[\]()#+!|~-])")
LONGEST = 200


def model_card(run: Path, checkpoint: Checkpoint, repository: str) -> str:
    """Return the card of a run's checkpoint; raises ConfigError and RunDirectoryError."""
    config = load_config(run / CONFIG_FILE, files_gone=True)
    parts = [_front(config), f"# {escaped(repository.partition('/')[2])}", _about(config)]
    metrics = [one for one in read_metrics(run / METRICS_FILE) if one["step"] <= checkpoint.step]
    found = summarize(metrics, wall_s=0.0, configured=config.configured_channels)
    active = {name: one["active_steps"] for name, one in found["channels"].items()}
    channels = ", ".join(f"{escaped(name)} ({steps})" for name, steps in active.items() if steps)
    parts.append(
        f"Trained for {checkpoint.step:,} optimizer steps on {found['tokens_trained']:,} tokens of "
        f"{found['rollouts']:,} rollouts. Channels, with the steps in which each was active: "
        f"{channels or 'none'}."
    )
    evaluations = read_evaluations(run / EVALUATIONS_FILE)
    parts += ["## Evaluation", "\n".join(_evaluated(evaluations, checkpoint.step))]
    parts += ["## Use", _use(repository), "## Settings", _settings(config)]
    return "\n\n".join(parts) + "\n"


def escaped(text: object) -> str:
    """Return a text of others for Markdown: one line, without markup of its own."""
    line = "".join(one if one.isprintable() else " " for one in str(text))[:LONGEST]
    return (
        _MARKS.sub(r"\\\1", html.escape(line))
        .replace("://", ":\u200b//")
        .replace("www.", "www\u200b.")
    )


def _front(config: Config) -> str:
    """Return the metadata that a hub reads."""
    about: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if (base := id_of(_base(config))) is not None:
        about["base_model"] = base.repo
    if data := sorted({one.repo for one in _datasets(config)}):
        about["datasets"] = data
    about["tags"] = ["composer-mesh", "sft" if config.sft is not None else "reinforcement-learning"]
    lines = [f"{key}: {json.dumps(value)}" for key, value in about.items()]  # JSON is YAML
    return "\n".join(["---", *lines, "---"])


def _datasets(config: Config) -> Iterator[HubId]:
    paths = [one.path for one in config.data.tasks]
    paths += [] if config.sft is None else [config.sft.path]
    yield from (named for path in paths if (named := id_of(path)) is not None)


def _base(config: Config) -> Path | str | None:
    """Return the path of the model that a run began with, before a supervised run of its own."""
    folder = config.policy.start.partition(":")[2].partition("@")[0]
    if not folder or Path(folder).parent.name != FOLDER:
        return config.policy.path
    try:
        before = load_config(Path(folder).parents[1] / CONFIG_FILE, files_gone=True)
    except ConfigError:
        return Path(folder)
    return before.policy.path


def _about(config: Config) -> str:
    base, named = _base(config), id_of(_base(config))
    if named is not None:
        model = f"`{named.repo}` at commit `{named.revision}`"
    elif base is None:
        model = "a small built-in model"
    else:
        model = f"the model {escaped(Path(base).name)}, which is on no hub"
    if str(base).endswith(GGUF) or (named is not None and named.part):
        model += " (its weights were dequantized from a GGUF file)"
    tasks = ", ".join(escaped(one.task.rpartition("/")[2]) for one in config.data.tasks)
    data = ", ".join(f"`{one}`" for one in _datasets(config)) or "rows that are on no hub"
    before = " after supervised fine-tuning" if config.policy.start != "base" else ""
    return (
        f"A checkpoint of the Composer Mesh run {escaped(config.run.name)}, trained{before} from "
        f"{model} on the task {tasks} with {data}."
    )


def _evaluated(evaluations: list[Evaluation], step: int) -> Iterator[str]:
    past = [one for one in evaluations if one.step <= step]
    if not past:
        yield "It was not evaluated."
        return
    yield "| policy | held-out success | 95 % interval | episodes |"
    yield "|---|---|---|---|"
    for one in past[:1] if len(past) == 1 else (past[0], past[-1]):
        low, high = one.interval
        yield f"| step {one.step} | {one.success:.1%} | {low:.1%} to {high:.1%} | {one.episodes} |"


def _use(repository: str) -> str:
    return (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{repository}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{repository}")\n```'
    )


def _settings(config: Config) -> str:
    table = config.model_dump(
        mode="json",
        include={"run": {"seed", "steps"}, **dict.fromkeys(SHOWN, True)},
        exclude_defaults=True,
        exclude_none=True,
    )
    versions = ", ".join(f"{name} {installed_version(name) or 'of a folder'}" for name in PACKAGES)
    shown = tomli_w.dumps(_public(table))
    return f"{versions}. Settings that are not the defaults:\n\n```toml\n{shown}```"


def _public(value: Any) -> Any:
    """Return the settings of a table without those that may hold a path, an address or a key."""
    if isinstance(value, dict):
        kept = {key: _public(one) for key, one in value.items() if key not in HIDDEN}
        return {key: one for key, one in kept.items() if one not in (None, {})}
    if isinstance(value, list):
        return [kept for one in value if (kept := _public(one)) is not None]
    return None if isinstance(value, str) and not re.fullmatch(r"[\w. -]{1,60}", value) else value
