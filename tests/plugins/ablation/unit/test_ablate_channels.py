"""Ablations with a channel of a user's own: it has an arm as ours have."""

from __future__ import annotations

from pathlib import Path

import pytest
from guides import Guide
from repository import ROOT

from composer_mesh.configs.load import load_config
from composer_mesh.plugins.ablation.plan import plan_ablation

(MODULE,) = Guide.read("channels.md").blocks("python")
"""The channel of the docs page."""


def test_a_channel_of_a_users_own_is_an_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_channel.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    file = ROOT / "configs" / "quickstart.toml"
    settings = [
        "run.steps=6",
        "channels.observations.import_path=users_channel:Observations",
        "channels.observations.weight=0.5",
    ]
    plan = plan_ablation(file, settings, ("neither", "observations", "both"), (0,))
    base = load_config(file, settings)
    weights = [
        (one.config.sdpo.alpha, one.config.replay.beta, one.config.channels["observations"].weight)
        for one in plan.runs
    ]
    assert weights == [(0, 0, 0), (0, 0, 0.5), (base.sdpo.alpha, base.replay.beta, 0)]
