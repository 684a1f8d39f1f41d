"""Reward files are read as strictly as Harbor reads them."""

from __future__ import annotations

import pytest

from composer_mesh.plugins.harbor.rewards import (
    VerifierFault,
    mean_of,
    reaches,
    read_rewards,
    reward_of,
)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"reward.txt": b"1"}, {"reward": 1.0}),
        ({"reward.txt": b" 0.25\n"}, {"reward": 0.25}),
        ({"reward.json": b'{"reward": 0.5, "style": 1}'}, {"reward": 0.5, "style": 1.0}),
        ({"reward.json": b'{"a": 0}', "reward.txt": b"1"}, {"a": 0.0}),
        ({"reward.json": b'{"reward": true}'}, {"reward": 1.0}),
        ({"reward.json": b"{}"}, {}),
    ],
)
def test_finite_numbers_are_read_and_json_wins(
    files: dict[str, bytes], found: dict[str, float]
) -> None:
    assert read_rewards(files) == found


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({}, "no_reward"),
        ({"test-stdout.txt": b"1"}, "no_reward"),
        ({"reward.txt": b""}, "empty_reward"),
        ({"reward.txt": b" \n"}, "empty_reward"),
        ({"reward.json": b"", "reward.txt": b"1"}, "empty_reward"),
        *(({"reward.txt": one}, "bad_reward") for one in (b"nan", b"inf", b"-inf", b"1e999")),
        *(({"reward.txt": one}, "bad_reward") for one in (b"one", b"1 2", b"\xff", b"1,0")),
        *(
            ({"reward.json": one}, "bad_reward")
            for one in (
                *(b"1", b"[1]", b'"1"', b"null", b"{", b"\xff", b'{"reward": "1"}'),
                *(b'{"reward": null}', b'{"reward": NaN}', b'{"reward": Infinity}'),
                *(b'{"reward": 1e309}', b'{"reward": [1]}', b'{"a": 1, "b": {}}'),
                *(b'{"reward": 1' + b"0" * 400 + b"}", b"[" * 100_000),
            )
        ),
    ],
)
def test_anything_else_is_a_fault_and_no_reward(files: dict[str, bytes], kind: str) -> None:
    with pytest.raises(VerifierFault) as fault:
        read_rewards(files)
    assert fault.value.kind == kind


def test_of_several_numbers_the_configured_one_trains() -> None:
    assert reward_of({"reward": 0.5, "style": 1.0}, "reward") == 0.5
    assert reward_of({"style": 1.0, "speed": 0.0}, "speed") == 0.0
    assert reward_of({"score": 0.75}, "reward") == 0.75
    for rewards, key in (({"a": 1.0, "b": 1.0}, "reward"), ({"a": 1.0}, "b"), ({}, "reward")):
        with pytest.raises(VerifierFault, match=r"data\.options\.reward_key"):
            reward_of(rewards, key)


def test_steps_have_a_mean_by_key_and_thresholds() -> None:
    assert mean_of([{"a": 1.0, "b": 1.0}, {"a": 0.0}]) == {"a": 0.5, "b": 0.5}
    assert reaches({"reward": 0.5}, {"reward": 0.5})
    assert not reaches({"reward": 0.4}, {"reward": 0.5})
    assert not reaches({"a": 1.0}, {"a": 1.0, "b": 0.0})
    assert reaches({}, {})
