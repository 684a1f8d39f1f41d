"""The store of images: verified, unpacked once, shared by processes, never half-written."""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_images import ARCHITECTURE, INDEX, Blobs, archive_of, docker_archive, layer, tiny_root

from composer_mesh.plugins.harbor.containers.port import ContainerError
from composer_mesh.plugins.harbor.images import store as store_module
from composer_mesh.plugins.harbor.images.store import ImageStore, UnpackedImage

LAYERS = [layer(("etc", None), ("etc/a", b"low")), layer(("etc/a", b"high"), ("b", b"x" * 5000))]
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def unpacked(tmp_path: Path, reference: str, **bounds: Any) -> UnpackedImage:
    """Unpack an image in a store of its own process."""
    return ImageStore(tmp_path / "store", **bounds).unpacked(reference, time.monotonic() + 30)


def blob_of(folder: Path, digest: str) -> Path:
    return folder / "blobs" / digest.replace(":", "/")


def test_an_image_is_the_same_from_all_its_forms(tmp_path: Path) -> None:
    image = Blobs(LAYERS, {"Env": ["A=b", "C=d=e"], "WorkingDir": "/etc", "User": "agent"})
    layout = image.layout(tmp_path / "layout")
    archive = archive_of(layout, tmp_path / "layout.tar")
    saved = docker_archive(tmp_path / "saved.tar", LAYERS)
    found = [
        unpacked(tmp_path, one)
        for one in (
            f"oci:{layout}:v1",
            f"oci:{layout}",
            f"oci-archive:{archive}:v1",
            f"docker-archive:{saved}:tiny:v1",
        )
    ]
    assert len({one.root for one in found}) == 1, "one unpacked root for the same layers"
    assert found[0] == found[1] == found[2]
    assert dict(found[0].config.environment) == {"A": "b", "C": "d=e"}
    assert (found[0].config.workdir, found[0].config.user) == ("/etc", "agent")
    root = found[0].root
    assert (root / "etc/a").read_bytes() == b"high"
    assert sorted(one.name for one in root.iterdir()) == ["b", "dev", "etc", "proc"]


def test_a_folder_is_unpacked_once_per_content(tmp_path: Path) -> None:
    folder = tiny_root(tmp_path / "tiny", ["cat"])
    first, again = (unpacked(tmp_path, f"rootfs:{folder}") for _ in range(2))
    assert first == again
    assert (first.root / "bin/cat").stat().st_mode & 0o777 == 0o755
    (folder / "etc/new").write_text("x")
    assert unpacked(tmp_path, f"rootfs:{folder}").root != first.root


@pytest.mark.parametrize("place", ["layers", "config", "described"])
def test_bytes_that_are_not_their_digest_are_refused(tmp_path: Path, place: str) -> None:
    image = Blobs(LAYERS)
    layout = image.layout(tmp_path / "layout")
    found = image.manifest["layers"][1] if place == "layers" else image.manifest.get(place)
    blob = blob_of(layout, (found or image.described)["digest"])
    content = bytearray(blob.read_bytes())
    content[len(content) // 2] ^= 1
    blob.write_bytes(content)
    with pytest.raises(ContainerError) as raised:
        unpacked(tmp_path, f"oci:{layout}")
    assert raised.value.kind == "image_digest"
    assert list((tmp_path / "store/roots").iterdir()) == [], "nothing of it is kept"


def test_a_layer_must_be_what_its_config_says(tmp_path: Path) -> None:
    other = Blobs(LAYERS[:1] * 2)
    image = Blobs(LAYERS, rootfs=other.config["rootfs"])
    with pytest.raises(ContainerError, match=r"image_digest.*unpacked layer"):
        unpacked(tmp_path, f"oci:{image.layout(tmp_path / 'layout')}")


MISSING = {
    "no layout": ("oci:{}/none", "does not exist"),
    "no name": ("oci:{}/layout:v2", "has 0 images named 'v2'; it has 'v1'"),
    "no archive": ("oci-archive:{}/none.tar", "no archive"),
    "no folder": ("rootfs:{}/none", "no folder"),
    "no path": ("oci:", "names no path"),
    "no reference": ("UPPER/CASE:1", "names no image"),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_image_says_what_there_is(tmp_path: Path, name: str) -> None:
    Blobs(LAYERS).layout(tmp_path / "layout")
    reference, said = MISSING[name]
    with pytest.raises(ContainerError, match=said) as raised:
        unpacked(tmp_path, reference.format(tmp_path))
    assert raised.value.kind == "image_missing"


def test_the_image_of_this_machine_is_chosen(tmp_path: Path) -> None:
    ours, other = Blobs(LAYERS), Blobs(LAYERS[:1])
    other.blobs |= ours.blobs
    entries = [
        {**other.described, "platform": {"os": "linux", "architecture": "riscv"}},
        {**ours.described, "platform": {"os": "linux", "architecture": ARCHITECTURE}},
    ]
    index = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}).encode()
    other.described = other.add(index, INDEX)
    found = unpacked(tmp_path, f"oci:{other.layout(tmp_path / 'layout')}")
    assert found.identity == ours.described["digest"]
    only = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries[:1]}).encode()
    other.described = other.add(only, INDEX)
    with pytest.raises(ContainerError, match="only linux/riscv") as raised:
        unpacked(tmp_path, f"oci:{other.layout(tmp_path / 'another')}")
    assert raised.value.kind == "image_missing"


INVALID = {
    "a link at a mount point": [layer(("a", None), *[], ("proc", b"no folder"))],
    "more than is unpacked": [layer(*[(f"{one}", b"") for one in range(200)])],
    "a long name": [layer(("n" * 400, b""))],
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_image_is_refused_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    layout = Blobs(INVALID[name]).layout(tmp_path / "layout")
    with pytest.raises(ContainerError) as raised:
        unpacked(tmp_path, f"oci:{layout}", most_entries=100)
    assert raised.value.kind == "image_invalid"
    assert list((tmp_path / "store/roots").iterdir()) == []


def test_a_layer_that_expands_without_end_is_refused(tmp_path: Path) -> None:
    layout = Blobs([layer(("zeros", bytes(1 << 20)))]).layout(tmp_path / "layout")
    with pytest.raises(ContainerError, match="image_invalid"):
        unpacked(tmp_path, f"oci:{layout}", most_bytes=1 << 16)


def zstd_layout(folder: Path) -> Path:
    """Return a layout whose layer is a tar after the magic number of zstd, and else no zstd."""
    return Blobs(LAYERS[:1], packed=lambda content: ZSTD_MAGIC + content).layout(folder)


def test_a_layer_of_zstd_is_read_by_the_module_that_python_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ZstdFile:
        def __init__(self, source: Any) -> None:
            assert source.read(4) == ZSTD_MAGIC
            self.read = source.read

    monkeypatch.setitem(sys.modules, "zstd_of_this_test", SimpleNamespace(ZstdFile=ZstdFile))
    monkeypatch.setattr(store_module, "ZSTD", ("zstd_that_is_not_there", "zstd_of_this_test"))
    root = unpacked(tmp_path, f"oci:{zstd_layout(tmp_path / 'layout')}").root
    assert (root / "etc/a").read_bytes() == b"low"


def test_a_layer_of_zstd_is_refused_by_name_where_python_has_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "ZSTD", ("zstd_that_is_not_there",))
    with pytest.raises(ContainerError, match=r"pip install backports\.zstd") as raised:
        unpacked(tmp_path, f"oci:{zstd_layout(tmp_path / 'layout')}")
    assert raised.value.kind == "unsupported"


def _unpack_and_report(folder: str, reference: str, found: Any) -> None:
    image = ImageStore(Path(folder)).unpacked(reference, time.monotonic() + 60)
    found.put((str(image.root), (image.root / "b").read_bytes() == b"x" * 5000))


def test_processes_that_want_the_same_image_unpack_it_once(tmp_path: Path) -> None:
    reference = f"oci:{Blobs(LAYERS).layout(tmp_path / 'layout')}"
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    arguments = (str(tmp_path / "store"), reference, found)
    processes = [context.Process(target=_unpack_and_report, args=arguments) for _ in range(4)]
    for one in processes:
        one.start()
    results = {found.get(timeout=60) for _ in processes}
    for one in processes:
        one.join()
    assert len(results) == 1
    assert next(iter(results))[1]
    assert len(list((tmp_path / "store/roots").iterdir())) == 1


def test_what_a_killed_process_left_is_not_used_and_is_removed(tmp_path: Path) -> None:
    reference = f"oci:{Blobs(LAYERS).layout(tmp_path / 'layout')}"
    root = unpacked(tmp_path, reference).root
    half = root.parent.with_name(f".partial-{root.parent.name}-left")
    root.parent.rename(half)
    (half / "root/b").unlink()
    assert (unpacked(tmp_path, reference).root / "b").exists()
    assert not half.exists()


def test_a_store_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o777)
    with pytest.raises(ContainerError, match="option cache"):
        ImageStore(tmp_path / "store")
