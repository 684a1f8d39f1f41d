"""Garbage collections of a process with a mesh are short, and rare."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from composer_mesh.mesh.actor import RARELY, leave_out_loaded
from composer_mesh.mesh.spawn import MeshHost


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_a_process_with_a_mesh_leaves_out_what_it_had_loaded_and_nothing_later() -> None:
    MeshHost()
    assert gc.get_freeze_count() > 10_000
    later = [object() for _ in range(10)]
    leave_out_loaded()
    MeshHost()
    assert any(one is later for one in gc.get_objects())  # which has none that is left out


def test_the_owner_of_a_mesh_seldom_collects_all_of_its_objects() -> None:
    MeshHost()
    assert gc.get_threshold() == RARELY
