"""Pulling from a registry: tokens, redirects, retries, and every way in which it fails."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from registry_server import FakeRegistry, served
from tiny_images import Blobs, digest_of, layer

from composer_mesh.plugins.harbor.containers.port import ContainerError
from composer_mesh.plugins.harbor.images.reference import RegistryReference, parsed
from composer_mesh.plugins.harbor.images.registry import ImageRegistry
from composer_mesh.plugins.harbor.images.store import ImageStore, UnpackedImage

IMAGE = [layer(("a", b"low")), layer(("b", b"high" * 300))]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeRegistry]:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with served(FakeRegistry(Blobs(IMAGE))) as made:
        yield made


def pulled(tmp_path: Path, reference: str, within_s: float = 30.0) -> UnpackedImage:
    return ImageStore(tmp_path / "store").unpacked(reference, time.monotonic() + within_s)


def test_an_image_is_pulled_with_a_token_that_goes_to_nobody_else(
    registry: FakeRegistry, tmp_path: Path
) -> None:
    found = pulled(tmp_path, registry.reference)
    assert (found.root / "b").read_bytes() == b"high" * 300
    assert found.identity == registry.image.described["digest"]
    assert {authorization for _, authorization in registry.stored} == {None}
    assert "Bearer secret" in {authorization for _, authorization in registry.requests}
    before = len(registry.stored)
    assert pulled(tmp_path, registry.reference) == found
    assert len(registry.stored) == before, "blobs are pulled once"


def test_a_digest_names_the_manifest(registry: FakeRegistry, tmp_path: Path) -> None:
    name = registry.reference.removesuffix(":v1")
    digest = registry.image.described["digest"]
    assert pulled(tmp_path, f"{name}@{digest}").identity == digest
    other = digest_of(b"another")
    registry.image.blobs[other] = b'{"schemaVersion": 2}'
    with pytest.raises(ContainerError) as raised:
        pulled(tmp_path, f"{name}@{other}")
    assert raised.value.kind == "image_digest"


def test_credentials_go_to_the_server_of_tokens(registry: FakeRegistry, tmp_path: Path) -> None:
    host = f"127.0.0.1:{registry.port}"
    stored = {"auths": {host: {"auth": "bWU6cGFzcw=="}}}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    pulled(tmp_path, registry.reference)
    tokens = [one for one in registry.requests if one[0].startswith("/token")]
    assert {authorization for _, authorization in tokens} == {"Basic bWU6cGFzcw=="}


def test_a_blob_that_is_not_its_digest_is_refused(registry: FakeRegistry, tmp_path: Path) -> None:
    wanted = registry.image.manifest["layers"][1]["digest"]
    registry.image.blobs[wanted] = bytes(len(registry.image.blobs[wanted]))
    with pytest.raises(ContainerError) as raised:
        pulled(tmp_path, registry.reference)
    assert raised.value.kind == "image_digest"
    assert not list((tmp_path / "store/blobs/sha256").glob(".partial-*"))


FAULTS = {
    "a missing image": (404, b'{"errors": [{"code": "MANIFEST_UNKNOWN"}]}', "image_missing"),
    "a refused image": (403, b'{"errors": [{"code": "DENIED"}]}', "registry"),
    "a broken server": (418, b"<html>", "registry"),
    "no manifest": (200, b"[1, 2]", "image_invalid"),
    "another manifest": (200, b'{"schemaVersion": 1}', "image_invalid"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_failure_has_its_kind(registry: FakeRegistry, tmp_path: Path, name: str) -> None:
    status, body, kind = FAULTS[name]
    registry.fault = lambda _path: (status, {}, body)
    with pytest.raises(ContainerError) as raised:
        pulled(tmp_path, registry.reference)
    assert raised.value.kind == kind
    assert registry.reference in str(raised.value)


def test_a_slow_registry_is_one_that_failed(registry: FakeRegistry, tmp_path: Path) -> None:
    registry.slow_s = 0.2
    with pytest.raises(ContainerError, match="no more time") as raised:
        pulled(tmp_path, registry.reference, 0.5)
    assert raised.value.kind == "registry"


def test_no_registry_is_there() -> None:
    reference = parsed("127.0.0.1:1/team/tiny:v1")
    assert isinstance(reference, RegistryReference)
    waits: list[float] = []
    with httpx.Client(trust_env=False) as client:
        made = ImageRegistry(reference, time.monotonic() + 600, client, None, waits.append)
        with pytest.raises(ContainerError, match=r"ConnectError.* in 5 attempts") as raised:
            made.manifest_tried("v1")
    assert raised.value.kind == "registry"
    assert waits == [0.5, 1.0, 2.0, 4.0]


def test_a_busy_registry_is_asked_again_when_it_says(registry: FakeRegistry) -> None:
    answers = iter([(429, {"Retry-After": "7"}, b""), (503, {}, b""), None])
    registry.fault = lambda _path: next(answers)
    reference = parsed(registry.reference)
    assert isinstance(reference, RegistryReference)
    waits: list[float] = []
    with httpx.Client(timeout=60) as client:
        made = ImageRegistry(reference, time.monotonic() + 60, client, None, waits.append)
        assert (
            made.manifest_tried("v1")[0] == registry.image.blobs[registry.image.described["digest"]]
        )
    assert waits == [7.0, 1.0]


@pytest.mark.parametrize("target", ["http://example.org/blob", "file:///etc/passwd"])
def test_no_redirect_leads_to_plain_http_elsewhere(
    registry: FakeRegistry, tmp_path: Path, target: str
) -> None:
    registry.fault = lambda path: (302, {"Location": target}, b"") if "blobs" in path else None
    with pytest.raises(ContainerError, match="no https URL"):
        pulled(tmp_path, registry.reference)


@pytest.mark.parametrize(
    ("reference", "url", "name"),
    [
        ("python", "https://registry-1.docker.io/v2", "docker.io/library/python:latest"),
        ("org/app:1", "https://registry-1.docker.io/v2", "docker.io/org/app:1"),
        ("ghcr.io/a/b:2", "https://ghcr.io/v2", "ghcr.io/a/b:2"),
        ("localhost:5000/a:3", "http://localhost:5000/v2", "localhost:5000/a:3"),
        ("10.0.0.1:5000/a:3", "https://10.0.0.1:5000/v2", "10.0.0.1:5000/a:3"),
        ("localhost.evil.org/a:3", "https://localhost.evil.org/v2", "localhost.evil.org/a:3"),
    ],
)
def test_names_are_those_of_docker_and_plain_http_is_for_this_machine(
    reference: str, url: str, name: str
) -> None:
    found = parsed(reference)
    assert isinstance(found, RegistryReference)
    assert (found.base_url, str(found)) == (url, name)
