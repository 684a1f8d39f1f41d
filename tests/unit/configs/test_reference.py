"""What is said of each key is what the schema does with it."""

from __future__ import annotations

import pytest

from composer_mesh.configs.reference import explained, keys
from composer_mesh.configs.schema import Config
from composer_mesh.services.cli import main


def test_every_key_has_a_sentence() -> None:
    assert [one.path for one in keys(Config) if not one.text] == []


@pytest.mark.parametrize(
    ("path", "value", "types"),
    [
        ("run.steps", "whole number, at least 1, at most 1,000,000,000, must be set", ()),
        ("generator.temperature", "number, at least 0.0001, at most 100, default 1.0", ()),
        ("replay.teachers.3.name", "text, at least 1 long, at most 100 long, must be set", ()),
        ("replay.teachers[].kind", '"builtin", "openai", "openrouter", must be set', ()),
        ("trainer.lora.rank", "whole number, at least 1, at most 100,000, default 16", ()),
        ("channels.mine.weight", "number, at least 0, at most 1e+12, default 0.0", ()),
        ("loss.tau_negative", "number, above 0, at most 1e+12, default 1.05", ("sapo",)),
        ("data.path", "path or text, default not set", ()),
    ],
)
def test_a_key_is_explained_by_its_path(path: str, value: str, types: tuple[str, ...]) -> None:
    (found,) = explained(Config, path)
    assert (found.value, found.types) == (value, types)


def test_the_choices_of_a_type_are_one_key() -> None:
    (found,) = explained(Config, "advantage.length_penalty.type")
    assert found.kind == '"none", "overlong", "kimi", "relative", "grpo_lead"'


def test_a_table_is_explained_with_its_keys() -> None:
    paths = [one.path for one in explained(Config, "trainer.lora")]
    assert paths[:2] == ["trainer.lora", "trainer.lora.rank"]
    assert "channels.NAME.weight" in [one.path for one in explained(Config, "channels")]


def test_a_name_alone_is_explained_wherever_it_is() -> None:
    assert {"trainer.lr", "sft.lr"} <= {one.path for one in explained(Config, "lr")}


def test_the_command_prints_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "trainer.lr"]) == 0
    assert capsys.readouterr().out == (
        "trainer.lr: number, above 0, at most 1e+12, default 0.0003\n    Peak learning rate.\n"
    )


def test_an_unknown_key_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "trainer.lrr"]) == 2
    assert "did you mean trainer.lr?" in capsys.readouterr().err


def test_without_a_key_the_tables_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    assert capsys.readouterr().out.startswith("run: table, must be set\n")
