"""A process with a strict umask, as every run has, makes images that any user of them can read."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tiny_images import Blobs, layer

from composer_mesh.plugins.harbor.images.store import ImageStore


def test_the_root_of_an_image_is_open_to_its_users(tmp_path: Path) -> None:
    os.umask(0o077)
    image = Blobs([layer(("etc/a", b"a"))]).layout(tmp_path / "layout")
    found = ImageStore(tmp_path / "store").unpacked(f"oci:{image}", time.monotonic() + 30)
    assert found.root.stat().st_mode & 0o777 == 0o755
