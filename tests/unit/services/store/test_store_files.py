"""The file of a group: every number comes back bit for bit, and a changed byte never does."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save
from stored_runs import group_of, trace_of

from composer_mesh.rollouts.traces import ExpertChoices, Trace, Turn
from composer_mesh.services.store.group_files import (
    group_bytes,
    path_of,
    read_group,
    traces_of,
    write_group,
)
from composer_mesh.services.store.group_files import (
    group_of as group_named,
)
from composer_mesh.services.store.rows import DamagedRecord

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=8)
FLOATS = st.floats(allow_nan=False, allow_infinity=True)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    action = draw(TOKENS)
    size = len(action)
    logprobs = draw(st.lists(FLOATS, min_size=size, max_size=size))
    versions = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    return Turn(draw(TOKENS), action, logprobs, versions, draw(st.sampled_from(["stop", "length"])))


def with_turns(number: int, made: list[Turn]) -> Trace:
    trace = trace_of(3, number)
    trace.turns[:] = made
    return trace


@given(st.lists(st.lists(turns(), max_size=3), max_size=3))
def test_every_trace_comes_back_as_it_was(made: list[list[Turn]]) -> None:
    traces = [with_turns(number, turns) for number, turns in enumerate(made)]
    assert traces_of(group_bytes(traces)) == traces


def test_rewards_and_advantages_of_turns_come_back_and_files_without_them_are_read() -> None:
    plain = with_turns(0, [Turn([1], [2], [-0.5], [0], "stop")])
    turned = replace(plain, turn_rewards=[0.1], turn_advantages=[-0.2])
    assert traces_of(group_bytes([turned, plain])) == [turned, plain]
    tensors = load(group_bytes([plain]))
    body = json.loads(tensors["body"].tobytes())
    for head in body:
        del head["turn_rewards"], head["turn_advantages"]
    tensors["body"] = np.frombuffer(json.dumps(body).encode(), np.uint8)
    assert traces_of(save(tensors)) == [plain]
    body[0]["turn_rewards"] = [1.0, 2.0]
    tensors["body"] = np.frombuffer(json.dumps(body).encode(), np.uint8)
    with pytest.raises(ValueError, match="2 turn_rewards for 1 turns"):
        traces_of(save(tensors))


def test_a_reward_that_is_no_usual_number_comes_back_too() -> None:
    traces = [replace(trace_of(0, n), reward=reward) for n, reward in enumerate((math.inf, 0.1))]
    assert traces_of(group_bytes(traces)) == traces


@pytest.mark.parametrize("width", ["f", "d"])
def test_log_probs_keep_every_bit_in_whichever_width_they_have(width: str) -> None:
    numbers = np.random.default_rng(3).standard_normal(500) * 10
    logprobs = [*np.asarray(numbers, width).astype("d").tolist(), -0.0, float("-inf")]
    size = len(logprobs)
    trace = with_turns(0, [Turn([], [1] * size, logprobs, [0] * size, "stop")])
    content = group_bytes([trace])
    (found,) = traces_of(content)
    assert struct.pack(f"{size}d", *found.turns[0].logprobs) == struct.pack(f"{size}d", *logprobs)
    assert all(type(one) is float for one in found.turns[0].logprobs)
    assert (len(content) > 6 * size + 1500) == (width == "d")


def test_a_token_costs_its_id_its_log_prob_and_no_version() -> None:
    size = 20_000
    turn = Turn([100_000] * size, [100_000] * size, [-0.5] * size, [7] * size, "stop")
    assert len(group_bytes([with_turns(0, [turn])])) < 12 * size + 2000


def test_a_thousand_groups_share_a_folder(tmp_path: Path) -> None:
    assert path_of(tmp_path, 12) == tmp_path / "traces" / "000" / "000012.safetensors"
    assert path_of(tmp_path, 1_234_567) == tmp_path / "traces" / "1234" / "1234567.safetensors"
    assert group_named(path_of(tmp_path, 12)) == 12
    assert group_named(tmp_path / "notes.txt") is None


def test_a_group_is_replaced_as_a_whole(tmp_path: Path) -> None:
    write_group(tmp_path, 0, group_of(0, size=3))
    size, crc = write_group(tmp_path, 0, group_of(0))
    assert read_group(tmp_path, 0, size, crc) == group_of(0)
    assert [path.name for path in (tmp_path / "traces" / "000").iterdir()] == ["000000.safetensors"]


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    size, crc = write_group(tmp_path, 0, group_of(0))
    path = path_of(tmp_path, 0)
    content = path.read_bytes()
    for place in range(0, size, 7):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(DamagedRecord, match=r"its CRC-32 is \w+, and \w+ was written"):
            read_group(tmp_path, 0, size, crc)


def test_a_file_that_was_cut_or_is_gone_is_found(tmp_path: Path) -> None:
    size, crc = write_group(tmp_path, 0, group_of(0))
    path = path_of(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedRecord, match=f"it has {size - 1} bytes, and {size} were written"):
        read_group(tmp_path, 0, size, crc)
    path.unlink()
    with pytest.raises(DamagedRecord, match="cannot be read: No such file"):
        read_group(tmp_path, 0, size, crc)


def test_another_file_under_its_name_is_no_group(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it is not a group's file"):
        traces_of(b"something else")


@pytest.mark.parametrize("width", [1, 2])
def test_experts_of_turns_come_back_and_groups_without_them_have_no_array(width: int) -> None:
    first, second = group_of(3, 2)
    experts = ExpertChoices(2, 2, width, bytes(range(24)) * width)
    turns = [replace(first.turns[0], experts=experts), *first.turns[1:]]
    group = [replace(first, turns=turns), second]
    content = group_bytes(group)
    assert traces_of(content) == group
    assert load(content)["experts"].nbytes == 24 * width
    assert "experts" not in load(group_bytes([first, second]))


@pytest.mark.parametrize(("stated", "why"), [(5, "experts have 24 bytes"), (7, "7 positions are")])
def test_experts_that_are_not_stated_are_refused(stated: int, why: str) -> None:
    (first,) = group_of(3, 1)
    experts = ExpertChoices(2, 2, 1, bytes(range(24)))
    group = [replace(first, turns=[replace(first.turns[0], experts=experts), *first.turns[1:]])]
    arrays = load(group_bytes(group))
    body = arrays["body"].tobytes().replace(b'"experts":[[6,', b'"experts":[[%d,' % stated)
    arrays["body"] = np.frombuffer(body, np.uint8)
    with pytest.raises(ValueError, match=why):
        traces_of(save(arrays, {"format": "composer-mesh group 1"}))
