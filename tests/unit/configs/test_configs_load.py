"""Configs resolve, survive a round trip, and take overrides.

Every number, text and list of the schema is bounded.

Configs that overflow, nest or never end are refused with where and what; see `tests/fuzz`.

Settings of the channels that contradict each other are refused, with what to change.
"""

from __future__ import annotations

import ast
import inspect
import os
import typing
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
from annotated_types import Ge, Gt, Le, Lt, MaxLen
from pydantic import BaseModel, ValidationError
from repository import ROOT

from composer_mesh.configs.base import Section
from composer_mesh.configs.changes import changes
from composer_mesh.configs.channels import ChannelSchedule
from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.load import dump_toml, load_config
from composer_mesh.configs.schema import Config
from composer_mesh.configs.sdpo import SdpoConfig

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


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_opens_with_hardware_duration_and_audience(path: Path) -> None:
    comment = path.read_text().split("\n\n", 1)[0]
    assert all(line.startswith("#") for line in comment.splitlines())
    assert all(word in comment for word in ("Hardware:", "Duration:", "Who runs it:"))


@pytest.mark.plugins
@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_resolves_and_reads_back_the_same(
    path: Path, problems: Path, tmp_path: Path
) -> None:
    config = load_preset(path, problems)
    assert config.run.name == path.stem
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


def leaves(annotation: Any, metadata: tuple[Any, ...], path: str) -> Iterator[tuple[str, Any, Any]]:
    """Every type in an annotation with the bounds that hold for it."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield from leaves(field.annotation, tuple(field.metadata), f"{path}.{name}")
    elif origin is typing.Annotated:
        yield from leaves(inner[0], (*metadata, *_unfolded(inner[1:])), path)
    elif origin in (tuple, dict):
        yield path, origin, metadata
        for one in inner:
            yield from leaves(one, (), path)
    elif origin is not None and origin is not Literal:
        for one in inner:
            yield from leaves(one, metadata, path)
    else:
        yield path, annotation, metadata


def _unfolded(metadata: tuple[Any, ...]) -> Iterator[Any]:
    for one in metadata:
        yield from getattr(one, "metadata", (one,))


LEAVES = list(leaves(Config, (), "config"))


def test_every_number_has_a_lower_and_an_upper_bound() -> None:
    numbers = [leaf for leaf in LEAVES if leaf[1] in (int, float)]
    assert len(numbers) > 150
    for path, _, metadata in numbers:
        assert any(isinstance(one, Ge | Gt) for one in metadata), path
        assert any(isinstance(one, Le | Lt) for one in metadata), path


def test_every_list_and_table_has_a_longest_length() -> None:
    many = [leaf for leaf in LEAVES if leaf[1] in (tuple, dict)]
    assert len(many) > 15
    for path, kind, metadata in many:
        assert any(isinstance(one, MaxLen) for one in metadata), (path, kind)


def test_every_text_has_a_longest_length() -> None:
    assert Section.model_config["str_max_length"] == 10_000
    kinds = {kind for _, kind, _ in LEAVES if isinstance(kind, type)} - {Any}
    assert kinds == {int, float, str, bool, tuple, dict, Path, type(None)}


SMALL = '[run]\nname = "small"\nsteps = 1\n[data]\ntask = "toolbox"\n'


HOSTILE = {
    "more replicas than a machine has processes": (
        "[environment]\nreplicas = 1_000_000_000_000",
        ["environment.replicas = 1000000000000", "at most 1000", "lower it to 1000"],
    ),
    "hosts by the million": (
        '[[placement.hosts]]\nname = "a"\ncores = 1\nmemory_gb = 1\ncount = 1_000_000',
        ["placement.hosts[0].count", "at most 1000"],
    ),
    "hosts together": (
        '[placement]\nhosts = [{name="a", cores=1, memory_gb=1, count=600}, '
        '{name="b", cores=1, memory_gb=1, count=600}]',
        ["1200 hosts", "at most 1000", "lower count"],
    ),
    "a number that no double holds": (
        "[trainer]\nlr = 1e999",
        ["trainer.lr", "finite"],
    ),
    "seconds that no clock counts": (
        "[supervision]\nhang_s = 1e300",
        ["supervision.hang_s = 1e+300", "at most 31536000"],
    ),
    "an integer of 5,000 digits": (
        "[trainer]\nlr = " + "9" * 5000,
        ["line 7", "thousands of digits", "smaller number"],
    ),
    "a hexadecimal integer of 5,000 digits": (
        "[trainer]\nlr = 0x" + "f" * 5000,
        ["20000 bits", "trainer.lr", "smaller number"],
    ),
    "brackets inside each other": (
        "[trainer]\nlr = " + "[" * 5000 + "]" * 5000,
        ["line 7", "inside each other", "flatten"],
    ),
    "tables inside each other": (
        "[loss.kwargs" + ".a" * 30 + "]\nb = 1",
        ["inside each other", "loss.kwargs.a", "flatten"],
    ),
    "a key of 50,000 parts": (
        "a" + ".a" * 50_000 + " = 1",
        ["50000 dots in line 6", "at most 64"],
    ),
    "free values inside each other": (
        '[loss]\ntype = "custom"\nimport_path = "m.f"\nkwargs = {a = [[[[[[[[[1]]]]]]]]]}',
        ["loss.kwargs", "more than 8", "flatten"],
    ),
    "a path that no file system has": (
        '[policy]\ncache_dir = "' + "n" * 300 + '"',
        ["policy.cache_dir", "300", "shorten it"],
    ),
    "a text as long as a book": (
        '[cluster]\npython = "' + "p" * 20_000 + '"',
        ["cluster.python", "at most 10000 characters", "shorten it"],
    ),
}


def refusal(text: str, tmp_path: Path) -> str:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    return str(caught.value)


@pytest.mark.parametrize(("text", "said"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_value_beyond_every_bound_is_refused_with_its_place_and_the_repair(
    text: str, said: list[str], tmp_path: Path
) -> None:
    message = refusal(SMALL + text, tmp_path)
    for part in said:
        assert part in message
    assert len(message) < 1500


def test_a_message_about_three_thousand_unknown_tables_is_bounded(tmp_path: Path) -> None:
    message = refusal(SMALL + "\n".join(f"[t{n}]" for n in range(3000)), tmp_path)
    assert "3000 problems" in message
    assert "t0 = {}: unknown key" in message
    assert "and 2980 more: correct these first" in message
    assert len(message.splitlines()) == 22


def test_a_message_has_no_control_characters_of_the_file(tmp_path: Path) -> None:
    message = refusal(SMALL + '["\\u001b[2J\\u202e"]\n', tmp_path)
    assert "\\x1b[2J\\u202e" in message
    assert all(line.isprintable() for line in message.splitlines())


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.toml")
    with pytest.raises(ConfigError, match="is a FIFO and not a regular file"):
        load_config(tmp_path / "run.toml")


def test_a_device_without_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="is a device and not a regular file"):
        load_config(Path("/dev/zero"))


def test_a_pipe_as_data_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "data.jsonl")
    file = tmp_path / "run.toml"
    file.write_text(SMALL.replace("toolbox", "gsm8k"))
    with pytest.raises(ConfigError, match=r"data\.path = .*no such file in .*, or no regular one"):
        load_config(file, [f"data.path={tmp_path / 'data.jsonl'}"])


@pytest.mark.parametrize(
    "override",
    [
        "run.steps=" + "9" * 5000,
        "run.steps=" + "[" * 5000,
        "a" + ".a" * 5000 + "=1",
        "replay.teachers." + "9" * 5000 + ".name=a",
        "run.steps" + "9" * 5000 + "=1",
    ],
)
def test_a_hostile_override_is_refused_with_its_key(override: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(SMALL)
    with pytest.raises(ConfigError, match="--set") as caught:
        load_config(file, [override])
    assert len(str(caught.value)) < 1500


TEACHERS = [{"name": "a", "kind": "builtin"}, {"name": "b", "kind": "builtin"}]


REPLAY: dict[str, Any] = {"beta": 0.3, "ask": 2, "teachers": TEACHERS}


FALLING = {"decay": "linear", "by": "agreement"}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"sdpo": {"alpha": 1.0, "min_update_share": 0.5, "max_update_share": 0.4}}, "within both"),
        (
            {
                "sdpo": {"alpha": 1.0, "min_update_share": 0.6},
                "replay": {**REPLAY, "min_update_share": 0.4},
            },
            "leaves the policy nothing",
        ),
        ({"sdpo": {"alpha": 1.0, "max_update_share": 0.0}}, "greater than 0"),
        ({"sdpo": {"alpha": 1.0, "min_update_share": 1.0}}, "less than 1"),
        (
            {"sdpo": {"alpha": 1.0, "min_advantage": 0.0, "advantage_sites": 0}},
            "advantage_sites is 0",
        ),
        (
            {"sdpo": {"alpha": 1.0, "advantage_sites": 4, "teacher_output": "topk"}},
            "lacks the log-probs of right actions",
        ),
        ({"sdpo": {"alpha": 1.0, "alpha_schedule": FALLING}}, "no teacher is queried"),
        ({"trainer": {"update_share_every": -1}}, "greater than or equal to 0"),
    ],
)
def test_a_channel_that_cannot_be_so_is_refused(
    build_config: Any, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        build_config(**sections)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"by": "success"}, "never falls"),
        ({"decay": "linear", "start": 0.2}, "which reads neither"),
        ({"decay": "linear", "by": "success", "start": 0.9, "end": 0.9}, "set start below end"),
    ],
)
def test_a_schedule_that_has_no_course_is_refused(schedule: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ChannelSchedule.model_validate(schedule)


def test_a_channel_that_is_off_may_keep_its_bounds_as_arms_of_an_ablation_do(
    build_config: Any,
) -> None:
    assert not build_config(sdpo={"alpha": 0.0, "min_update_share": 0.4}).sdpo.on


def test_agreement_may_be_followed_where_teachers_are_asked(build_config: Any) -> None:
    config = build_config(sdpo={"alpha": 1.0, "alpha_schedule": FALLING}, replay=REPLAY)
    assert config.sdpo.alpha_schedule.by == "agreement"


def test_a_run_whose_weights_move_with_its_length_keeps_it_on_resume(build_config: Any) -> None:
    def lengthened(schedule: dict[str, Any]) -> bool:
        sdpo = {"alpha": 1.0, "alpha_schedule": schedule}
        one, other = (
            build_config(sdpo=sdpo, run={"name": "unit", "steps": steps}) for steps in (5, 9)
        )
        (change,) = changes(one, other)
        return change.safe

    assert lengthened({"warmup_steps": 2})
    assert lengthened({"decay": "linear", "by": "success"})
    assert not lengthened({"decay": "linear"})


def test_how_often_shares_are_measured_may_change_on_resume(build_config: Any) -> None:
    one, other = (build_config(trainer={"update_share_every": every}) for every in (0, 5))
    assert [change.safe for change in changes(one, other)] == [True]
    one, other = (build_config(sdpo={"alpha": 1.0, "max_update_share": s}) for s in (0.3, 0.5))
    assert [change.safe for change in changes(one, other)] == [False]


def test_everything_is_off_by_default() -> None:
    config = SdpoConfig()
    assert (config.sites, config.advantage_sites, config.min_advantage) == ("all", 4, None)
    assert not config.is_bounded


def test_actions_are_compared_by_default_where_they_can_be(build_config: Any) -> None:
    divided = {"ranks": 2, "context_parallel": 2, "packing": True}
    assert build_config(sdpo={"alpha": 0.5}).sdpo.advantage_sites == 4
    assert build_config(sdpo={"alpha": 0.5, "teacher_output": "topk"}).sdpo.advantage_sites == 0
    config = build_config(sdpo={"alpha": 0.5}, trainer=divided)
    assert config.sdpo.advantage_sites == 0
    assert type(config).model_validate(config.model_dump()) == config
