"""A host downloads the models that a run names by their ids, and says why one could not be."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.hub import HubId
from composer_mesh.mesh.actor import own_endpoint
from composer_mesh.mesh.hosts.agent import HostAgent
from composer_mesh.planning import hub

NAMED = HubId("acme/tiny", "main")


@pytest.fixture
def agent() -> HostAgent:
    return object.__new__(HostAgent)  # the endpoint needs none of what its process gives it


async def test_a_model_is_downloaded_into_the_cache_that_the_run_names(
    agent: HostAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []
    monkeypatch.setattr(hub, "whole_model", lambda *given: asked.append(given))
    assert await own_endpoint(agent, "fetch_model")(NAMED, "policy.path", tmp_path) == ""
    assert asked == [(NAMED, "policy.path", tmp_path)]


async def test_a_download_that_fails_is_an_answer(
    agent: HostAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("policy.path names acme/tiny, which is private: set HF_TOKEN")

    monkeypatch.setattr(hub, "whole_model", refuse)
    why = await own_endpoint(agent, "fetch_model")(NAMED, "policy.path", tmp_path)
    assert why == "policy.path names acme/tiny, which is private: set HF_TOKEN"
