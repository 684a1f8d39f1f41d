"""The directory of an evaluation: what it is about, so that only the same one goes on in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Any

from composer_mesh.configs.paths import with_whole_paths
from composer_mesh.configs.regular_files import read_regular
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.untrusted_json import parsed_json, short_reason
from composer_mesh.services.evaluation.report import write_json
from composer_mesh.services.evaluation.target import EvalRefused, Target

ABOUT_FILE = "evaluation.json"
LONGEST = 1 << 20
SECTIONS = ("data", "environment", "policy", "generator", "rollouts")
"""Sections of the config on which results depend."""


def about(target: Target, model: str, samples: int, max_tokens: int) -> dict[str, Any]:
    """Return what an evaluation is about; equal ones may share their results."""
    config = with_whole_paths(target.config)
    return {
        "target": target.name,
        "model": model,
        "task": config.data.task,
        "samples": samples,
        "temperature": config.eval.temperature,
        "max_tokens": max_tokens,
        "seed": config.run.seed,
        "config": _digest(config),
    }


def open_output(output: Path, now: Mapping[str, Any], resume: bool) -> str:
    """Write what the evaluation is about, or compare it with what is there; raises EvalRefused.

    Returns the day on which it began, as 2026-01-31.
    """
    today = date.today().isoformat()
    if resume:
        return str(_same(output, now).get("begun", today))
    write_json(output / ABOUT_FILE, {**now, "begun": today})
    return today


def _same(output: Path, now: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a directory says its evaluation is about, which has to be the same."""
    path = output / ABOUT_FILE
    try:
        before = parsed_json(read_regular(path, LONGEST))
    except (OSError, ValueError) as error:
        raise EvalRefused(
            f"--resume: {path} cannot be read ({short_reason(error)}): leave --resume out to begin"
        ) from None
    for key, value in now.items():
        found = before.get(key) if isinstance(before, dict) else None
        if found != value:
            raise EvalRefused(
                f"--resume {output}: its {key} is {json.dumps(found)[:80]} but that of this "
                f"command is {json.dumps(value)[:80]}: give the same, or leave --resume out"
            )
    return dict(before)


def _digest(config: Config) -> str:
    parts = [config.model_dump_json(include={name}) for name in SECTIONS]
    return sha256("\n".join(parts).encode()).hexdigest()[:16]
