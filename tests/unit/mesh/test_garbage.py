"""What a process has loaded is left out of its garbage collections."""

from __future__ import annotations

import gc

from composer_mesh.mesh.garbage import leave_out_loaded
from composer_mesh.mesh.spawn import MeshHost


def test_a_process_with_a_mesh_leaves_out_what_it_had_loaded_and_nothing_later() -> None:
    MeshHost()
    assert gc.get_freeze_count() > 10_000
    later = [object() for _ in range(10)]
    leave_out_loaded()
    MeshHost()
    assert any(one is later for one in gc.get_objects())  # which has none that is left out
