"""What task.toml may say, and what is refused, reported or ignored of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_mesh.plugins.harbor.task_folder import resolved
from composer_mesh.plugins.harbor.task_toml import TaskToml, read_task_toml, unsupported
from composer_mesh.tasks.errors import UnusableTask

WHOLE = """
schema_version = "1.4"
source = "somewhere"
multi_step_reward_strategy = "final"
artifacts = ["/app/out", {source = "/app/db", destination = "db", exclude = ["*.tmp"]}]
[task]
name = "org/name"
authors = [{name = "A", email = "a@example.com"}]
[metadata]
anything = {goes = 1}
[agent]
timeout_sec = 60
user = "agent"
[verifier]
timeout_sec = 30
env = {KEY = "${KEY:-none}"}
environment_mode = "separate"
[[verifier.collect]]
command = "true"
[verifier.environment]
docker_image = "python:3.11-slim"
[solution]
env = {A = "b"}
[environment]
docker_image = "python:3.11-slim"
cpus = 2
memory_mb = 512
storage_mb = 1024
network_mode = "no-network"
workdir = "/app"
[environment.healthcheck]
command = "true"
[[environment.mcp_servers]]
name = "notes"
transport = "stdio"
command = "python3"
args = ["/app/server.py"]
[[steps]]
name = "first"
min_reward = 0.5
[[steps]]
name = "second"
min_reward = {reward = 1.0}
"""


def read(folder: Path, text: str) -> tuple[TaskToml, tuple[str, ...]]:
    file = folder / "task.toml"
    file.write_text(text)
    return read_task_toml(file)


def test_every_key_of_the_format_is_read_and_none_is_reported(tmp_path: Path) -> None:
    toml, unknown = read(tmp_path, WHOLE)
    assert unknown == ()
    assert list(unsupported(toml)) == []
    assert toml.verifier.separate
    assert toml.environment.mcp_servers[0].args == ["/app/server.py"]
    assert [step.min_reward for step in toml.steps or []] == [0.5, {"reward": 1.0}]


def test_older_keys_are_read_as_the_newer_ones(tmp_path: Path) -> None:
    text = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512m"\nallow_internet = false'
    toml, unknown = read(tmp_path, text)
    table = toml.environment
    assert unknown == ()
    assert (toml.schema_version, table.memory_mb, table.storage_mb) == ("1.0", 2048, 512)
    assert table.network_mode == "no-network"


def test_unknown_keys_are_reported_at_any_depth(tmp_path: Path) -> None:
    text = (
        "colour = 1\n[agent]\ntimeout = 5\n[[environment.mcp_servers]]\nname = 'a'\n"
        "transport = 'stdio'\ncommand = 'x'\nspeed = 1\n[[steps]]\nname = 's'\nlast = true\n"
    )
    _, unknown = read(tmp_path, text)
    assert set(unknown) == {
        *("colour", "agent.timeout", "environment.mcp_servers.speed", "steps.last")
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[agent]\ntimeout_sec = 'long'", "agent.timeout_sec is 'long': "),
        ("[agent]\ntimeout_sec = -1", "agent.timeout_sec is -1: "),
        ("[agent]\ntimeout_sec = true", "agent.timeout_sec is True: "),
        ("[verifier]\ntimeout_sec = inf", "verifier.timeout_sec is inf: "),
        ("[environment]\nmemory_mb = 1.5", "environment.memory_mb is 1.5: "),
        ("[environment]\nmemory = '2X'", "memory is '2X': write a size"),
        ("[environment]\nmemory = '1G'\nmemory_mb = 5", "keep one"),
        ("[environment]\nallow_internet = 'no'", "allow_internet is 'no': write true or false"),
        ("[environment]\nnetwork_mode = 'some'", "environment.network_mode is 'some': "),
        ("[environment]\nallowed_hosts = ['a.org']", 'set network_mode to "allowlist"'),
        (
            "[agent]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['https://a.org']",
            "without scheme",
        ),
        ("[agent]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a.org:443']", "without scheme"),
        ("[agent]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['*']", "'*': write a name"),
        ("[agent]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['10.0.0.1/8']", "a CIDR range"),
        ("[[environment.mcp_servers]]\nname = 'a'", "url is not set but transport is 'sse'"),
        *(
            (f"[[environment.mcp_servers]]\nname = 'a'\nurl = '{url}'", "write http://HOST:PORT")
            for url in ("ftp://a", "http://", "http://u:p@a/", "http://a:b/", "http://a:0/", "a b")
        ),
        *(
            (
                f"[[environment.mcp_servers]]\nname = 'a'\nurl = 'http://a'\nheaders = {{{one}}}",
                said,
            )
            for one, said in (
                ("'a b' = 'c'", "'a b', which is no header of HTTP"),
                ('a = "b\\nc"', "'a', which is no header of HTTP"),
                ("Authorization = 'Bearer abc'", "'Authorization', which is a credential: write"),
                ("X-Api-Key = 'abc'", "'X-Api-Key', which is a credential: write"),
            )
        ),
        ("[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]\n", "remove one of them"),
        ("[[steps]]\nname = 'a'\n[[steps]]\nname = 'A'", "two steps have one name"),
        ("[[steps]]\nname = '../up'", "steps.0.name is '../up': "),
        ("artifacts = [{source = '/a/../b'}]", "write a path without '..'"),
        ("schema_version = '1.5'", "1.0 to 1.4 are read"),
        ("schema_version = 1", "schema_version is 1: "),
        ("[task]\nname = 'bare'", "task.name is 'bare': "),
        ("[agent\n", "cannot be read as TOML"),
    ],
)
def test_a_wrong_value_is_refused_with_file_key_and_value(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(UnusableTask) as refused:
        read(tmp_path, text)
    assert said in str(refused.value)
    assert str(tmp_path / "task.toml") in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[environment]\nos = 'Windows'", "containers here are Linux"),
        ("[environment]\ngpus = 1", "accelerators"),
        ("[environment.tpu]\ntype = 'v6e'\ntopology = '2x4'", "accelerators"),
        ("[environment]\nskills_dir = '/skills'", "skills"),
        ("[[verifier.collect]]\ncommand = 'x'\nservice = 'db'", "service 'db'"),
        ("artifacts = [{source = '/a', service = 'db'}]", "service 'db'"),
        ("[verifier.environment]\nos = 'windows'", "verifier.environment.os"),
    ],
)
def test_what_containers_here_do_not_offer_is_named(tmp_path: Path, text: str, said: str) -> None:
    toml, _ = read(tmp_path, text)
    assert any(said in one for one in unsupported(toml))


def test_variables_of_this_machine_are_those_that_the_options_name() -> None:
    given = {"A": "${KEY}", "B": "x-${NONE:-y}", "C": "plain"}
    assert resolved(given, {"KEY": "k"}, "env") == {"A": "k", "B": "x-y", "C": "plain"}
    with pytest.raises(UnusableTask, match=r"takes \$\{PATH\} of this machine"):
        resolved({"A": "${PATH}"}, {}, "env")
