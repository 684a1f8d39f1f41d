"""Recipes for data-juicer: each side in a file of its own, the second after the first."""

from pathlib import Path

import pytest
import yaml

from composer_mesh.configs.replay import DEFAULT_FILTERS, LengthFilter
from composer_mesh.plugins.frameworks.data_juicer import recipe, write_recipes


def test_two_recipes_are_chained_and_have_one_text_key_each(tmp_path: Path) -> None:
    paths = write_recipes(tmp_path / "r", tmp_path / "pairs.jsonl", tmp_path / "clean.jsonl")
    first, second = (yaml.safe_load(path.read_text()) for path in paths)
    assert [path.name for path in paths] == ["chosen.yaml", "rejected.yaml"]
    assert (first["text_keys"], second["text_keys"]) == (["chosen_text"], ["rejected_text"])
    assert first["dataset_path"] == str(tmp_path / "pairs.jsonl")
    assert second["dataset_path"] == first["export_path"] != second["export_path"]
    assert second["export_path"] == str(tmp_path / "clean.jsonl")


def test_bounds_are_those_of_our_filters() -> None:
    operators = recipe("rejected", Path("a"), Path("b"), DEFAULT_FILTERS)["process"]
    assert operators == [
        {"text_length_filter": {"min_len": 8, "max_len": 32_000}},
        {
            "words_num_filter": {
                "lang": "en", "tokenization": False, "min_num": 2, "max_num": 4_096,
            }
        },
        {"special_characters_filter": {"min_ratio": 0.0, "max_ratio": 0.5}},
    ]  # fmt: skip


def test_a_filter_of_one_side_is_in_its_recipe_alone() -> None:
    only = [LengthFilter(sides=("chosen",))]
    assert recipe("chosen", Path("a"), Path("b"), only)["process"]
    assert recipe("rejected", Path("a"), Path("b"), only)["process"] == []


def test_a_recipe_that_would_overwrite_its_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="write to another file"):
        write_recipes(tmp_path, tmp_path / "a.jsonl", tmp_path / "a.jsonl")
