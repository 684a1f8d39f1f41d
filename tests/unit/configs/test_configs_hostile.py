"""Configs that overflow, nest or never end are refused with where and what; see `tests/fuzz`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.load import load_config

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
