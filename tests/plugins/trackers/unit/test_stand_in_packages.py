"""What two trackers do with their packages, which stand-ins take the place of here.

`make test-trackers` does the same with the packages themselves.
"""

from __future__ import annotations

import importlib
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from composer_mesh.configs.tracking import PrometheusTracking, WandbTracking
from composer_mesh.services.trackers.port import TrackedRun, TrackedStep

PACKAGE = "composer_mesh.plugins.trackers"


@pytest.fixture
def tracker_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A tracker's module, imported with stand-ins for what it imports."""
    imported: list[str] = []

    def load(module: str, **packages: ModuleType) -> Any:
        for name, package in packages.items():
            monkeypatch.setitem(sys.modules, name.replace("__", "."), package)
        imported.append(f"{PACKAGE}.{module}")
        monkeypatch.delitem(sys.modules, imported[-1], raising=False)
        return importlib.import_module(imported[-1])

    yield load
    for name in imported:
        sys.modules.pop(name, None)


def stand_in(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    return module


def test_a_resumed_run_has_its_earlier_id_in_wandb(tracker_of: Any, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    def init(**options: Any) -> Any:
        asked.append(options)
        return SimpleNamespace(url="https://example.invalid/run")

    wandb = stand_in("wandb", init=init, Settings=lambda **_: None)
    module = tracker_of("experiments", wandb=wandb)
    for folder in ("one", "one", "other"):
        module.WandbTracker(WandbTracking(type="wandb")).start(
            TrackedRun("unit", tmp_path / folder, {})
        )
    first, resumed, other = (one["id"] for one in asked)
    assert first == resumed
    assert first != other
    assert {one["resume"] for one in asked} == {"allow"}


class _Gauge:
    def __init__(self, name: str, _title: str, _labels: list[str], registry: dict[str, float]):
        self._name, self._registry = name, registry

    def labels(self, **_: str) -> _Gauge:
        return self

    def set(self, value: float) -> None:
        self._registry[self._name] = value


def test_figures_are_served_to_who_brings_the_token_alone(
    tracker_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = (lambda registry: repr(dict(registry)).encode()), "text/plain"
    exposition = stand_in("prometheus_client.exposition", choose_encoder=lambda _: encode)
    client = stand_in("prometheus_client", CollectorRegistry=dict, Gauge=_Gauge)
    module = tracker_of(
        "to_prometheus", prometheus_client=client, prometheus_client__exposition=exposition
    )
    monkeypatch.setenv("UNIT_TOKEN", "right")
    section = PrometheusTracking(type="prometheus", port=0, token_env="UNIT_TOKEN")
    tracker = module.PrometheusTracker(section)
    url = tracker.start(TrackedRun("unit", tmp_path, {}))
    try:
        tracker.log(TrackedStep(3, 0.0, {"reward": 0.5}))
        assert _status(url, "Bearer right") == 200
        for header in (None, "", "Bearer wrong", "right"):
            assert _status(url, header) == 401
    finally:
        tracker.finish("finished")


def _status(url: str, authorization: str | None) -> int:
    headers = {} if authorization is None else {"Authorization": authorization}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
