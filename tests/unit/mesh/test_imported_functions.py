"""The slots of a loaded library hold the functions that it calls."""

from __future__ import annotations

import ctypes
import math
import sys
from pathlib import Path

import pytest

from composer_mesh.mesh.connection_guard import function_slots, write_slot

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux loads ELF libraries"
)


def loaded_math() -> Path:
    """The library of `math`, which calls the `pow` of libm."""
    if not getattr(math, "__file__", None):
        pytest.skip("math is built into this Python")
    return Path(str(math.__file__))


def own_pow() -> int:
    """The address of libm's `pow`, which a library that calls it holds."""
    return ctypes.cast(ctypes.CDLL("libm.so.6").pow, ctypes.c_void_p).value or 0


def test_a_slot_holds_the_imported_function_until_another_is_written() -> None:
    assert math.pow(2.0, 3.0) == 8.0  # the linker may fill a slot at the first call
    (slot, *_) = function_slots(loaded_math(), own_pow())
    double = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double, ctypes.c_double)
    other = double(lambda a, b: a + b)
    try:
        write_slot(slot, ctypes.cast(other, ctypes.c_void_p).value or 0)
        assert math.pow(2.0, 3.0) == 5.0
    finally:
        write_slot(slot, own_pow())
    assert math.pow(2.0, 3.0) == 8.0


def test_a_function_that_is_not_imported_has_no_slot() -> None:
    double = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)
    unknown = double(lambda a: a)
    assert function_slots(loaded_math(), ctypes.cast(unknown, ctypes.c_void_p).value or 0) == []


def test_a_library_that_is_not_loaded_has_no_slot(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(loaded_math().read_bytes())
    assert function_slots(library, own_pow()) == []
