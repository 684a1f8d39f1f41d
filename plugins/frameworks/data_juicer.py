"""The quality filters of pairs as recipes of data-juicer: two files, one for each side, chained.

    recipes = write_recipes(Path("recipes"), Path("pairs.jsonl"), Path("clean.jsonl"))
    # dj-process --config recipes/chosen.yaml && dj-process --config recipes/rejected.yaml

One recipe with a second text key would leave it unfiltered: data-juicer 1.6 keeps the statistics of
the first pass without the key. Imports no data-juicer.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from composer_mesh.configs.replay import (
    DEFAULT_FILTERS,
    FilterConfig,
    LengthFilter,
    Side,
    SpecialCharactersFilter,
    WordsFilter,
)

SIDES: tuple[Side, ...] = ("chosen", "rejected")
KEYS = {"chosen": "chosen_text", "rejected": "rejected_text"}
"""Columns of the rows of `composer-mesh replay`."""


def recipe(
    side: Side, source: Path, target: Path, filters: Sequence[FilterConfig] = DEFAULT_FILTERS
) -> dict[str, Any]:
    """Return the recipe of one side.

    Duplicates are left to `rollouts.pair_filters`: data-juicer compares one text alone, and would
    drop the pairs of other states that have the same answer.
    """
    return {
        "project_name": f"pairs-{side}",
        "dataset_path": str(source),
        "export_path": str(target),
        "np": 1,
        "text_keys": [KEYS[side]],
        "process": [operator for one in filters if (operator := _operator(one, side)) is not None],
    }


def write_recipes(
    folder: Path, source: Path, target: Path, filters: Sequence[FilterConfig] = DEFAULT_FILTERS
) -> list[Path]:
    """Write both recipes; return their paths, in the order in which they have to run.

    The second reads what the first writes, a file next to `target`.
    """
    if source == target:
        raise ValueError(f"source and target are both {source}: write to another file")
    between = target.with_name(f"{target.stem}.{SIDES[0]}{target.suffix}")
    folder.mkdir(parents=True, exist_ok=True)
    paths, ends = list[Path](), [source, between, target]
    for place, side in enumerate(SIDES):
        path = folder / f"{side}.yaml"
        content = recipe(side, ends[place], ends[place + 1], filters)
        path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        paths.append(path)
    return paths


def _operator(config: FilterConfig, side: Side) -> dict[str, Any] | None:
    """Return data-juicer's operator of a filter; None if it has none for this side."""
    sides = getattr(config, "sides", ())
    if side not in sides:
        return None
    match config:
        case LengthFilter():
            return {"text_length_filter": {"min_len": config.min, "max_len": config.max}}
        case WordsFilter():
            bounds = {"min_num": config.min, "max_num": config.max}
            return {"words_num_filter": {"lang": "en", "tokenization": False, **bounds}}
        case SpecialCharactersFilter():
            ratios = {"min_ratio": 0.0, "max_ratio": config.max_ratio}
            return {"special_characters_filter": ratios}
    return None
