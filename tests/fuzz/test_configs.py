"""Hostile configs: each is refused with a message that names where, or accepted at once."""

from __future__ import annotations

import io
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from hostile_configs import SMALL, config_of, overrides

from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.services.checks.accepting import accept
from composer_mesh.services.cli import REFUSALS, main

LONGEST_S, READINGS = 1.0, 5
LONGEST_MESSAGE = 25_000
EVERY_NTH_BY_COMMAND_LINE = 20


def refusal(file: Path, sets: list[str]) -> str:
    """The message of a refused config, by what `check` decides with; empty if accepted."""
    try:
        accept(load_config(file, sets, model_later=True))
    except REFUSALS as error:
        return str(error)
    return ""


def refusal_of_command(file: Path, sets: list[str]) -> str:
    words = [word for one in sets for word in ("--set", one)]
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(["check", str(file), *words])
    said = err.getvalue()
    assert (status, bool(said)) in ((0, False), (2, True))
    assert said == "" or said.startswith("composer-mesh: ")
    return said.removeprefix("composer-mesh: ").rstrip("\n")


def names_where(message: str) -> bool:
    """Whether a message says the key, the line or the byte that is to be mended."""
    places = (
        *Config.model_fields,
        "--set",
        "line ",
        "byte",
        "KB",
        "the key",
        "unknown key",
        "end of document",
    )
    return any(place in message for place in places)


def seconds_of(file: Path, sets: list[str]) -> float:
    """CPU time of this thread for one more reading."""
    began = time.thread_time()
    refusal(file, sets)
    return time.thread_time() - began


def is_slow(file: Path, sets: list[str], took: float, longest_s: float = LONGEST_S) -> bool:
    """Whether every one of several readings takes too long: on a busy machine one of them may."""
    again = (seconds_of(file, sets) for _ in range(READINGS))
    return took > longest_s and all(one > longest_s for one in again)


def assert_tells_where(message: str) -> None:
    assert names_where(message), message[:500]
    assert len(message) < LONGEST_MESSAGE
    assert all(line.isprintable() for line in message.split("\n")), repr(message[:300])


def assert_refused_or_accepted(rng: random.Random, file: Path, by_command: bool) -> bool:
    """Read a made config; return whether it was refused."""
    file.write_bytes(config_of(rng))
    sets = overrides(rng)
    by_command = by_command and not any(one.startswith("-") for one in sets)
    began = time.thread_time()
    message = (refusal_of_command if by_command else refusal)(file, sets)
    took = time.thread_time() - began
    assert not is_slow(file, sets, took), f"it took {took:.2f} s of the processor"
    if message:
        assert_tells_where(message.replace(str(file), ""))
    return bool(message)


def test_a_hostile_config_is_refused_with_its_key_at_once_or_accepted(
    cases: Callable[[int], Iterator[int]], tmp_path: Path
) -> None:
    refused = 0
    for seed in cases(1_000):
        by_command = seed % EVERY_NTH_BY_COMMAND_LINE == 0
        try:
            refused += assert_refused_or_accepted(
                random.Random(seed), tmp_path / "run.toml", by_command
            )
        except BaseException as error:
            raise AssertionError(
                f"seed {seed}: {type(error).__name__}: {str(error)[:500]}"
            ) from error
    assert refused > 0


def test_a_config_is_slow_only_if_every_reading_of_it_is(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(SMALL)
    assert not is_slow(file, [], took=2 * LONGEST_S)
    assert is_slow(file, [], took=2 * LONGEST_S, longest_s=0.0)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop", "long name", "large", "gone"])
def test_what_is_no_regular_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file = Path("/dev/zero")
    elif kind == "folder":
        file.mkdir()
    elif kind == "loop":
        file.symlink_to(file)
    elif kind == "long name":
        file = tmp_path / ("n" * 300)
    elif kind == "large":
        file.write_text("#" * 300_000)
    assert refusal_of_command(file, [])
