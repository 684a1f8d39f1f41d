"""Source distributions are read and never run."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import tracemalloc
from pathlib import Path

import pytest
from pytest_httpserver import HTTPServer
from small_packages import FILES, archive

from composer_mesh.plugins.code_tasks.command.sources import SourceUnavailable, opened, unpacked
from composer_mesh.plugins.code_tasks.making.package import PackageRefused

PAGE = '<a href="/small-1.2.tar.gz#sha256={}">small-1.2.tar.gz</a>'


def served(server: HTTPServer, sha256: str) -> list[str]:
    server.expect_request("/simple/small/").respond_with_data(
        PAGE.format(sha256), content_type="text/html"
    )
    server.expect_request("/small-1.2.tar.gz").respond_with_data(archive())
    return [server.url_for("/simple")]


def test_an_archive_is_read_without_its_first_folder(tmp_path: Path) -> None:
    file = tmp_path / "small-1.2.tar.gz"
    file.write_bytes(archive())
    found = opened(str(file), [])
    assert found.files == FILES
    assert (found.name, found.version) == ("small", "1.2")
    assert found.sha256 == hashlib.sha256(archive()).hexdigest()


def test_a_folder_has_a_checksum_of_its_files(tmp_path: Path) -> None:
    for path, content in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    found = opened(str(tmp_path), [])
    assert found.files == FILES
    (tmp_path / "README.md").write_bytes(b"Other.")
    assert opened(str(tmp_path), []).sha256 != found.sha256


def test_a_package_of_an_index_is_fetched_with_its_checksum(httpserver: HTTPServer) -> None:
    indexes = served(httpserver, hashlib.sha256(archive()).hexdigest())
    assert opened("small", indexes).files == FILES


def test_an_archive_that_is_not_what_the_index_states_is_refused(httpserver: HTTPServer) -> None:
    with pytest.raises(SourceUnavailable, match="but the index states"):
        opened("small", served(httpserver, "0" * 64))


def test_a_package_that_no_index_has_is_refused(httpserver: HTTPServer) -> None:
    httpserver.expect_request("/simple/small/").respond_with_data("", content_type="text/html")
    with pytest.raises(SourceUnavailable, match="no index has a source distribution of small"):
        opened("small", [httpserver.url_for("/simple")])


def test_links_and_devices_of_an_archive_are_left_out() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as packed:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
            member = tarfile.TarInfo(f"small-1/{kind.decode()}")
            member.type, member.linkname = kind, "/etc/passwd"
            packed.addfile(member)
    assert unpacked("small-1.tar.gz", buffer.getvalue()).files == {}


@pytest.mark.parametrize(
    "kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK]
)
def test_a_header_that_states_gigabytes_is_refused_and_not_read(kind: bytes) -> None:
    stated = tarfile.TarInfo("small-1/x")
    stated.type, stated.size = kind, 4 << 30
    content = gzip.compress(stated.tobuf(tarfile.GNU_FORMAT) + bytes(64 << 20), 1)
    tracemalloc.start()
    try:
        with pytest.raises(PackageRefused, match="a header of 4,294,967,296 bytes"):
            unpacked("small-1.tar.gz", content)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE])
@pytest.mark.parametrize("size", [-512, 4 << 30])
def test_a_file_that_states_an_impossible_size_is_refused(kind: bytes, size: int) -> None:
    stated = tarfile.TarInfo("small-1/x")
    stated.type, stated.size = kind, size
    content = gzip.compress(stated.tobuf(tarfile.GNU_FORMAT) + bytes(10_240))
    with pytest.raises(PackageRefused, match=r"a header of -512 bytes|unpacks to too much"):
        unpacked("small-1.tar.gz", content)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("small-1.tar.gz", b"no archive", "cannot be read"),
        ("small-1.zip", b"no archive", "cannot be read"),
        ("small.whl", b"", "is no source distribution"),
    ],
)
def test_what_is_no_source_distribution_is_refused(name: str, content: bytes, says: str) -> None:
    with pytest.raises(SourceUnavailable, match=says):
        unpacked(name, content)


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(SourceUnavailable, match="no file and no folder"):
        opened("none/small-1.tar.gz", [])
