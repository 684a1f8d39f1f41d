"""The guide to services names what exists, and shows the defaults that are."""

from __future__ import annotations

import inspect
import re

import pytest
from guides import Guide

from composer_mesh.services import service
from composer_mesh.services.pool import dispatch as service_errors
from composer_mesh.services.pool.replicas import ReplicaState
from composer_mesh.services.service import Service

PAGE = Guide.read("service.md")


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("max_outstanding", service.MAX_OUTSTANDING),
        ("queue", service.QUEUE),
        ("deadline_s", service.DEADLINE_S),
        ("attempts", service.ATTEMPTS),
        ("drain_s", service.DRAIN_S),
    ],
)
def test_the_page_shows_each_default(name: str, default: float) -> None:
    shown = re.findall(rf"`{name}` \(([\d,]+)\)", PAGE.text)
    assert f"{default:,g}" in shown


def test_the_page_names_every_method_state_and_error() -> None:
    methods = [name for name, _ in inspect.getmembers(Service) if not name.startswith("_")]
    errors = [name for name in vars(service_errors) if name.startswith(("Service", "Session"))]
    states = [state.value for state in ReplicaState]
    for name in {*methods, *errors, *states} - {"check", "name"}:
        assert re.search(rf"\b{name}\b", PAGE.text), name
