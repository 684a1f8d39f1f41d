"""The slots of a loaded library hold the functions that it calls."""

from __future__ import annotations

import ctypes
import math
import sys
from pathlib import Path

import pytest

from composer_mesh.mesh.connection_guard import UnknownLibrary, function_slots, write_slot

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux loads ELF libraries"
)


def loaded_math() -> Path:
    """The library of `math`, which calls the `pow` of libm."""
    if not getattr(math, "__file__", None):
        pytest.skip("math is built into this Python")
    return Path(str(math.__file__))


def test_a_slot_holds_the_imported_function_until_another_is_written() -> None:
    (slot, *_) = function_slots(loaded_math(), "pow")
    assert math.pow(2.0, 3.0) == 8.0  # the linker may fill a slot at the first call
    before = ctypes.c_uint64.from_address(slot).value
    double = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double, ctypes.c_double)
    other = double(lambda a, b: a + b)
    try:
        write_slot(slot, ctypes.cast(other, ctypes.c_void_p).value or 0)
        assert math.pow(2.0, 3.0) == 5.0
    finally:
        write_slot(slot, before)
    assert math.pow(2.0, 3.0) == 8.0


def test_a_function_that_is_not_imported_has_no_slot() -> None:
    assert list(function_slots(loaded_math(), "accept4")) == []


def test_a_library_that_is_not_loaded_is_refused(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(loaded_math().read_bytes())
    with pytest.raises(UnknownLibrary, match="is not loaded"):
        list(function_slots(library, "pow"))
