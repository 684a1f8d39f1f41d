"""Bytes that clients hold are bounded for each and for all, and released in any end."""

from __future__ import annotations

import contextlib

import pytest

from composer_mesh.mesh.json_server import BudgetSpent, ByteBudget


def test_a_client_is_bounded_by_its_own_bytes_and_by_those_of_all() -> None:
    budget = ByteBudget(of_one=10, of_all=15)
    with budget.held_by("a") as first, budget.held_by("b") as second, budget.held_by("c") as third:
        first(10)
        with pytest.raises(BudgetSpent, match=r"one client may hold 10 bytes"):
            first(1)
        second(5)
        with pytest.raises(BudgetSpent, match="all clients together may hold 15 bytes") as spent:
            third(1)
        assert not spent.value.own
    assert budget.total == 0


def test_bytes_of_a_request_that_failed_are_released() -> None:
    budget = ByteBudget(of_one=10, of_all=10)
    for _ in range(3):
        with contextlib.suppress(BudgetSpent), budget.held_by("a") as held:
            held(7)
            held(7)
    assert budget.total == 0
    with budget.held_by("a") as held:
        held(10)
