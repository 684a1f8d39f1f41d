"""The page about agents names what exists, and each parameter that is ignored or refused."""

from __future__ import annotations

from guides import Guide

from composer_mesh.actors.rollout_workers.agent_endpoint import (
    APIS,
    LARGEST_REQUEST,
    RETRY_HEADER,
    RETRY_WAIT_S,
)
from composer_mesh.actors.rollout_workers.openai_chat import GENERATE_IGNORED, GENERATE_REFUSED
from composer_mesh.actors.rollout_workers.openai_wire import IGNORED, REFUSED

PAGE = Guide.read("agents.md")
REFUSED_BY_KIND = {"audio", "background", "conversation", "function_call", "modalities", "prompt"}
REFUSED_BY_KIND |= {"prediction", "truncation", "web_search_options"}


def test_every_ignored_and_refused_parameter_is_on_the_page() -> None:
    named = set(PAGE.inline())
    assert named >= IGNORED
    assert named >= set(REFUSED) - REFUSED_BY_KIND


def test_every_ignored_and_refused_parameter_of_ids_is_on_the_page() -> None:
    assert set(PAGE.inline()) >= GENERATE_IGNORED | set(GENERATE_REFUSED)


def test_what_the_page_says_about_requests_is_true() -> None:
    for api in APIS:
        assert f"`{api.replace(' ', ' /')}`" in PAGE.text
    assert f"`{RETRY_HEADER}`" in PAGE.text
    assert f"within {RETRY_WAIT_S:.0f} seconds" in " ".join(PAGE.text.split())
    assert f"above {LARGEST_REQUEST >> 20} MiB" in PAGE.text
