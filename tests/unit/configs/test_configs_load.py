"""Configs resolve, survive a round trip, and take overrides."""

import ast
import inspect
from itertools import pairwise
from pathlib import Path

import pytest
from repository import ROOT

from composer_mesh.configs.load import dump_toml, load_config
from composer_mesh.configs.schema import Config

PRESETS = sorted((ROOT / "configs").glob("*.toml"))
QUICKSTART = ROOT / "configs" / "quickstart.toml"


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """A GSM8K-format file, so that presets which need one resolve."""
    path = tmp_path / "problems.jsonl"
    path.write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    return path


def load_preset(path: Path, problems: Path) -> Config:
    overrides = [f"data.path={problems}"] if 'task = "gsm8k"' in path.read_text() else []
    return load_config(path, overrides, model_later=True)


@pytest.mark.plugins
@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_shipped_preset_resolves(path: Path, problems: Path) -> None:
    assert load_preset(path, problems).run.name == path.stem


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_opens_with_hardware_duration_and_audience(path: Path) -> None:
    comment = path.read_text().split("\n\n", 1)[0]
    assert all(line.startswith("#") for line in comment.splitlines())
    assert all(word in comment for word in ("Hardware:", "Duration:", "Who runs it:"))


@pytest.mark.plugins
@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_dumped_run_reads_back_the_same(path: Path, problems: Path, tmp_path: Path) -> None:
    config = load_preset(path, problems)
    copy = tmp_path / "config.toml"
    copy.write_text(dump_toml(config))
    assert load_config(copy, model_later=True) == config


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("run.steps=3", lambda c: c.run.steps == 3),
        ("trainer.lr=1", lambda c: c.trainer.lr == 1.0),
        ("run.name=other", lambda c: c.run.name == "other"),
        ('run.name="other"', lambda c: c.run.name == "other"),
        ("policy.warm_start.steps=0", lambda c: c.policy.warm_start.steps == 0),
        ("replay.teachers.1.error_rate=0.5", lambda c: c.replay.teachers[1].error_rate == 0.5),
        ("advantage.scale=none", lambda c: c.advantage.scale == "none"),
        ("loss.type=cispo", lambda c: c.loss.clip_high == 4.0),
        ("sdpo.temperature=0.5", lambda c: c.sdpo.temperature == 0.5),
    ],
)
def test_an_override_replaces_one_value(override: str, read: object) -> None:
    assert callable(read)
    assert not read(load_config(QUICKSTART))
    assert read(load_config(QUICKSTART, [override]))


def test_the_last_of_two_overrides_wins() -> None:
    assert load_config(QUICKSTART, ["run.steps=3", "run.steps=4"]).run.steps == 4


def test_an_override_may_name_a_section_that_the_file_leaves_out(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text('run = {name = "small", steps = 1}\ndata = {task = "toolbox"}\n')
    assert load_config(path, ["sdpo.alpha=0.5"]).sdpo.alpha == 0.5


def test_a_config_cannot_be_changed_after_it_was_read() -> None:
    config = load_config(QUICKSTART)
    with pytest.raises(ValueError, match="frozen"):
        config.run.steps = 3  # type: ignore[misc]


def test_every_field_says_in_one_sentence_what_it_is() -> None:
    for path, description in described(Config):
        assert description, path
        assert description.endswith("."), path


def described(section: type, prefix: str = "") -> list[tuple[str, str | None]]:
    rows: list[tuple[str, str | None]] = []
    texts = {
        name: text for base in section.__mro__[::-1] for name, text in docstrings(base).items()
    }
    for name, field in section.model_fields.items():  # type: ignore[attr-defined]
        rows.append((prefix + name, texts.get(name)))
        if isinstance(field.annotation, type) and hasattr(field.annotation, "model_fields"):
            rows += described(field.annotation, f"{prefix}{name}.")
    return rows


def docstrings(section: type) -> dict[str, str]:
    """The texts below the fields of a class."""
    if not section.__module__.startswith("composer_mesh."):
        return {}
    (found,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(found, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(found.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(text.value.value, str)
    }
