"""CISPO's clip bounds: numbers from when they were bounds of the ratio itself are doubted."""

from __future__ import annotations

from typing import Any

import pytest

from composer_mesh.configs.losses import CispoLoss
from composer_mesh.services.checks.accepting import accept


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"clip_high": 5.0}, "write clip_high = 4"),
        ({"clip_high": 1.28, "clip_low": 0.8}, "write clip_low = 0.2 and clip_high = 0.28"),
        ({"clip_high": 10.0, "clip_low": 0.1}, "write clip_low = 0.9 and clip_high = 9"),
    ],
)
def test_numbers_that_look_old_are_accepted_with_a_warning_that_names_the_new_ones(
    build_config: Any, capsys: pytest.CaptureFixture[str], old: dict[str, float], new: str
) -> None:
    accept(build_config(loss={"type": "cispo", **old}))
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("composer-mesh: warning: cispo lets ratios from")
    assert warning.endswith(new)


@pytest.mark.parametrize(
    "bounds",
    [
        {},
        {"clip_high": 4.0},
        {"clip_low": 0.2, "clip_high": 0.28},
        {"clip_low": 0.9, "clip_high": 9.0},
        {"clip_low": 1.0, "clip_high": 1.28},
    ],
)
def test_distances_that_are_in_use_are_not_doubted(bounds: dict[str, float]) -> None:
    assert CispoLoss(type="cispo", **bounds).bounds_warning == ""
