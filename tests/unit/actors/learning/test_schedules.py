"""The learning rate: an even rise, a peak, and a fall to where it shall end."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from composer_mesh.actors.learning.weight_update import learning_rate
from composer_mesh.channels.weights import channel_weight
from composer_mesh.configs.channels import ChannelSchedule
from composer_mesh.configs.trainer import TrainerConfig


def rates(steps: int, **trainer: Any) -> list[float]:
    config = TrainerConfig(lr=1.0, **trainer)
    return [learning_rate(config, step, steps) for step in range(steps)]


def test_a_constant_rate_stays() -> None:
    assert rates(5, lr_schedule="constant") == [1.0] * 5


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warm_up_rises_evenly_to_the_peak(schedule: str) -> None:
    found = rates(12, lr_schedule=schedule, warmup_steps=4)
    assert found[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_linear_and_cosine_fall_to_nothing_at_the_end() -> None:
    linear = rates(10, lr_schedule="linear")
    assert linear == pytest.approx([1 - step / 10 for step in range(10)])
    cosine = rates(10, lr_schedule="cosine")
    assert cosine == pytest.approx([0.5 * (1 + math.cos(math.pi * n / 10)) for n in range(10)])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_fall_ends_at_its_share_of_the_peak(schedule: str) -> None:
    config = TrainerConfig(lr=2.0, lr_schedule=schedule, warmup_steps=3, min_lr_ratio=0.1)
    found = [learning_rate(config, step, 20) for step in range(21)]
    assert found[2] == found[3] == 2.0
    assert found[3:] == sorted(found[3:], reverse=True)
    assert found[20] == pytest.approx(0.2)


def test_the_weight_of_a_channel_changes_as_the_rate_does() -> None:
    schedule = ChannelSchedule(decay="cosine", warmup_steps=3, min_ratio=0.1)
    expected = rates(20, lr_schedule="cosine", warmup_steps=3, min_lr_ratio=0.1)
    found = [channel_weight(0.5, schedule, step, 20) for step in range(20)]
    assert found == pytest.approx([0.5 * one for one in expected])
    assert channel_weight(0.5, ChannelSchedule(), 7, 20) == 0.5


def test_a_share_of_a_weight_that_never_falls_is_refused() -> None:
    with pytest.raises(ValidationError, match="never falls: set decay to 'linear'"):
        ChannelSchedule(min_ratio=0.1)


def test_a_share_of_a_rate_that_never_falls_is_refused() -> None:
    with pytest.raises(ValidationError, match="never falls: set lr_schedule to 'linear'"):
        TrainerConfig(min_lr_ratio=0.1)
