"""Compose files: what is read of them, what is ignored, and what is refused with its repair."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_mesh.plugins.harbor.compose import FILE, MOST_BYTES, Compose, read_compose
from composer_mesh.tasks.errors import UnusableTask

FULL = """
version: "3.8"
x-note: anything
services:
  main:
    working_dir: /work
    environment: {A: "1", B: null-like}
    depends_on: {web: {condition: service_healthy}, cache: {}}
    command: sleep infinity
  web:
    build: {context: web, dockerfile: deep/Other, args: [TAG=1]}
    image: web:built
    entrypoint: /bin/serve --name 'two words'
    environment:
      - ADDRESS=${HOST:-here}:$$PORT
      - KEY=${KEY}
    user: "1000"
    depends_on: [cache]
    ports: ["8000:8000"]
    restart: always
    healthcheck:
      test: ["CMD", "check", "it's up"]
      interval: 1m30s
      timeout: 500ms
      retries: 4
  cache:
    image: redis:7
    command: [redis-server, --port, "1"]
    healthcheck: {test: redis-cli ping}
"""
ONE = "services: {main: {}, web: {image: a, %s}}"


def read(folder: Path, text: str, **variables: str) -> Compose:
    (folder / "web/deep").mkdir(parents=True, exist_ok=True)
    (folder / "web/deep/Other").write_text("FROM a\n")
    (folder / FILE).write_text(text)
    return read_compose(folder, variables)


def test_services_are_read_in_the_order_of_their_starts(tmp_path: Path) -> None:
    found = read(tmp_path, FULL, KEY="secret")
    cache, web, main = found.services
    assert (found.names, found.main) == (("cache", "web", "main"), main)
    assert found.ignored == ("version", "x-note", "services.web.ports", "services.web.restart")
    assert (main.image, main.workdir, main.waits_for) == (None, "/work", ("web",))
    assert main.environment == {"A": "1", "B": "null-like"}
    assert web.image is not None
    assert (web.image.build, web.image.dockerfile) == (tmp_path / "web", "deep/Other")
    assert web.image.arguments == {"TAG": "1"}
    assert (web.entrypoint, web.command) == (("/bin/serve", "--name", "two words"), None)
    assert web.environment == {"ADDRESS": "here:$PORT", "KEY": "secret"}
    assert (web.user, web.waits_for) == ("1000", ())
    assert web.healthcheck is not None
    assert web.healthcheck.command == "check 'it'\"'\"'s up'"
    assert (web.healthcheck.interval_sec, web.healthcheck.timeout_sec) == (90.0, 0.5)
    assert web.healthcheck.retries == 4
    assert cache.image is not None
    assert (cache.image.reference, cache.command) == ("redis:7", ("redis-server", "--port", "1"))
    assert cache.healthcheck is not None
    assert cache.healthcheck.command == "redis-cli ping"


def test_a_task_without_a_file_has_the_main_service_alone(tmp_path: Path) -> None:
    assert [one.name for one in read_compose(tmp_path, {}).services] == ["main"]
    assert read_compose(tmp_path, {}).names == ()
    assert read(tmp_path, "services: {main: }").names == ()


def test_a_folder_in_the_place_of_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "docker-compose.yaml").mkdir()
    with pytest.raises(UnusableTask, match="no regular file"):
        read_compose(tmp_path, {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ONE % "privileged: true", "services.web.privileged is 'true', which containers here"),
        (ONE % "cap_add: [NET_ADMIN]", "services.web.cap_add is"),
        (ONE % "devices: [/dev/kvm]", "services.web.devices is"),
        (
            ONE % "network_mode: host",
            "network_mode is 'host'.*services of a task share one network",
        ),
        (ONE % "networks: [back]", "networks is .*services of a task share one network"),
        (ONE % "volumes: ['./a:/a']", "volumes is .*COPY files into the image"),
        (ONE % "env_file: .env", "env_file is '.env'.*write its variables to environment"),
        (ONE % "secrets: [s]", "secrets is .*data.options.variables"),
        (ONE % "profiles: [p]", "services.web.profiles is"),
        (ONE % "extends: {service: main}", "extends is .*write the keys out"),
        (ONE % "build: {context: web, target: x}", "services.web.build.target is 'x'"),
        (ONE % "build: {context: ../..}", "no file in environment/: copy it there"),
        (ONE % "build: {context: web, dockerfile: ../x}", "no file in environment/"),
        (ONE % "build: https://x.org/a.git", "no file in environment/"),
        (ONE % "working_dir: a", "services.web.working_dir is 'a'"),
        (ONE % "command: 'a \"b'", "services.web.command: No closing quotation"),
        (ONE % "environment: [KEY]", "KEY has no value and would be a variable of this machine"),
        (ONE % "environment: {KEY: }", "KEY has no value"),
        (ONE % "environment: {A: '$KEY'}", "environment.A is '.KEY': variables are"),
        (ONE % "environment: {A: '${KEY}'}", "takes .{KEY} of this machine"),
        (ONE % "environment: {A: '${KEY:?no}'}", "variables are"),
        (ONE % "depends_on: [other]", "depends_on names 'other', no service"),
        (ONE % "depends_on: [web]", "wait for each other: web -> web"),
        (ONE % "depends_on: {main: {condition: service_healthy}}", "which has no healthcheck"),
        (ONE % "depends_on: {main: {condition: service_completed_successfully}}", "condition is"),
        (ONE % "healthcheck: {test: [NONE]}", "begins with CMD or CMD-SHELL"),
        (ONE % "healthcheck: {test: [CMD]}", "begins with CMD or CMD-SHELL"),
        (ONE % "healthcheck: {test: a, interval: 5}", "'5' is no time: write one such as"),
        (ONE % "healthcheck: {test: a, retries: 0}", "retries is '0'"),
        (ONE % "healthcheck: {test: a, timeout: 0s}", "timeout is .*greater than 0"),
        (ONE % "environment: ['=x']", "'' is no name of a variable"),
        (ONE % "environment: {'A=B': x}", "'A=B' is no name of a variable"),
        ("services: {main: {}, web: {}}", "services.web has neither build nor image"),
        ("services: {main: {}, WEB: {image: a}}", "services.WEB"),
        ("services: {web: {image: a}}", "no service 'main'"),
        ("services: {main: {}}\nvolumes: {data: {}}", "volumes is"),
        ("services: {main: {}}\nnetworks: {n: {external: true}}", "networks is"),
        ("services: {main: {}}\ninclude: [a.yaml]", "include is"),
        ("services: []", "services is"),
        ("", "the file is None"),
        ("[]", "the file is"),
        ("services: {main: {}, main: {}}", "services has a key twice"),
        ("services: {main: &a {}, web: *a}", r"line 1 has the alias \*a: write the value out"),
        ("services: {main: !reset {}}", "line 1 has the tag '!reset'"),
        ("services: {main: {user: !!python/object/apply:os.system [x]}}", "has the tag"),
        ("services: {main: {}}\n---\nservices: {}", "cannot be read as YAML"),
        ("services: {main: [}", "cannot be read as YAML"),
        (r'services: {main: {user: "\UFFFFFFFF"}}', "cannot be read as YAML"),
        (r'services: {main: {user: "a\0"}}', "has a NUL or half of a character"),
        (r'services: {main: {user: "\ud800"}}', "has a NUL or half of a character"),
        (f"%YAML {'9' * 5000}.1\n---\na: b", "cannot be read as YAML"),
        ("a" * (MOST_BYTES + 1), "it has more than 65,536 bytes"),
    ],
)
def test_all_else_is_refused_with_its_value_and_the_repair(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(UnusableTask, match=f"environment/{FILE}: .*{said}"):
        read(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [b]\n" + "".join(f"a{n}: &a{n} [*a, *a, *a, *a]\n" for n in range(30)),
        "[" * 60_000,
        "{a: " * 15_000,
        "- " * 30_000,
        "a:\n" + "\n".join(" " * n + "a:" for n in range(1, 350)),
        "[" + "a," * 30_000 + "]",
        "? " * 30_000,
        "services: {main: {environment: {" + ", ".join(f"A{n}: b" for n in range(6000)) + "}}}",
    ],
)
def test_a_file_that_nests_or_grows_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UnusableTask, match=rf"environment/{FILE}: "):
        read(tmp_path, text[:MOST_BYTES])


def test_a_link_out_of_the_environment_is_no_context(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/Dockerfile").write_text("FROM a\n")
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment/web").symlink_to(tmp_path / "out")
    (tmp_path / "environment" / FILE).write_text("services: {main: {}, web: {build: web}}")
    with pytest.raises(UnusableTask, match="no file in environment/"):
        read_compose(tmp_path / "environment", {})
