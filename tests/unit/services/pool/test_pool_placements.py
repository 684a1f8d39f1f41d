"""Replicas start at their placement, and restart where a host has capacity."""

from __future__ import annotations

import pickle
from typing import Any, cast

import pytest
from fake_host import FakeHost, serve, until
from repository import ROOT

from composer_mesh.actors.experts.http import TOKEN_ENV
from composer_mesh.configs.load import load_config
from composer_mesh.mesh.process_resources import ADDRESS
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.planning.host_capacity import HostResources
from composer_mesh.services.checks.keys import held_keys, keys_of
from composer_mesh.services.pool.process_placement import ProcessPlacement, ProcessPlacements
from composer_mesh.services.pool.replicas import RestartRules
from composer_mesh.services.run.pools import Pools, proxy_env

GIB = 2**30
QUICKSTART = ROOT / "configs" / "quickstart.toml"
AT_HOSTS = ('cluster.kind="hosts"', 'cluster.workers=["tcp://10.0.0.5:1", "tcp://10.0.0.6:1"]')
TEACHER = (
    '{name="NAME", kind="openai", base_url="http://x/v1", model="m", api_key_env="KEY_NAME",'
    "prompt_usd_per_million=1, completion_usd_per_million=1}"
)
PAID = (
    f"replay.teachers=[{TEACHER.replace('NAME', 'X')}, {TEACHER.replace('NAME', 'Y')}]",
    "replay.budget.usd=1",
    "replay.ask=2",
)
SOON = RestartRules(restarts=3, backoff_s=1e-6, backoff_max_s=1e-6)
Events = list[tuple[str, str, str, dict[str, Any]]]


class Told:
    """What a pool records."""

    def __init__(self) -> None:
        self.events: Events = []

    def __call__(self, kind: str, actor: str, detail: str, /, **fields: Any) -> None:
        self.events.append((kind, actor, detail, fields))


def placed(hosts: str = "ab") -> ProcessPlacements:
    config = load_config(QUICKSTART, (*AT_HOSTS, "generator.replicas=2"))
    return ProcessPlacements.of(config, [HostResources(name, 8, 16 * GIB) for name in hosts])


async def test_each_replica_is_started_on_its_host_with_its_part_of_it() -> None:
    host, placements = FakeHost(), placed()
    pool = await serve(host, n=2, placement=placements.taker("generator"))
    assert {actor.on for actor in host.started} == {"a", "b"}
    assert all(actor.env and "OMP_NUM_THREADS" in actor.env for actor in host.started)
    assert {line["host"] for line in pool.status()} == {"a", "b"}


async def test_without_a_host_nothing_is_said_of_one() -> None:
    host = FakeHost()
    pool = await serve(host, n=1, placement=lambda _: ProcessPlacement(None, {"A": "1"}))
    assert (host.started[0].on, host.started[0].env) == (None, {"A": "1"})
    assert pool.status()[0]["host"] is None


async def test_a_replica_whose_host_is_lost_comes_again_on_another() -> None:
    host, placements, told = FakeHost(), placed(), Told()
    pool = await serve(
        host, n=2, placement=placements.taker("generator"), restart=SOON, record=told
    )
    dead = next(actor for actor in host.started if actor.on == "a")
    placements.lose("a")
    dead.die("its host a is lost")
    again = await host.started_as(f"{dead.name}.2")
    await until(lambda: pool.restarts == 1)
    assert again.on == "b"
    (restarted,) = (event for event in told.events if event[0] == "actor_restarted")
    assert restarted[3]["host"] == "b"
    assert " on b, " in restarted[2]


async def test_a_start_on_a_host_that_is_just_lost_is_tried_again_on_the_next() -> None:
    host, placements = FakeHost(), placed()

    def take(slot: int) -> ProcessPlacement:
        placement = placements.take("generator", slot)
        if placement.host in host.lost_hosts:
            placements.lose("a")  # known here only after this start
        return placement

    pool = await serve(host, n=2, placement=take, restart=SOON)
    dead = next(actor for actor in host.started if actor.on == "a")
    host.lost_hosts = {"a"}
    dead.die("its host a is lost")
    await until(lambda: pool.restarts == 1)
    (again,) = (actor for actor in host.started if actor.name.startswith(f"{dead.name}."))
    assert (again.name, again.on) == (f"{dead.name}.3", "b")


async def test_where_no_host_has_room_the_place_is_given_up_with_the_reason() -> None:
    host, placements, told = FakeHost(), placed("a"), Told()
    pool = await serve(
        host, n=2, placement=placements.taker("generator"), restart=SOON, record=told
    )
    placements.lose("a")
    host.started[0].die("its host a is lost")
    await until(lambda: any(event[0] == "actor_given_up" for event in told.events))
    (given_up,) = (event for event in told.events if event[0] == "actor_given_up")
    assert "no host has room for generator-0" in given_up[2]
    assert given_up[3]["class"] == "infrastructure"
    placements.join(HostResources("c", 8, 16 * GIB))
    await pool.resize(2)
    assert host.started[-1].on == "c", "a resize brings it back where a host has joined"


async def test_what_scale_adds_finds_room_of_its_own_or_is_refused() -> None:
    config = load_config(QUICKSTART, (*AT_HOSTS, "placement.generator.memory_gb=6"))
    placements = ProcessPlacements.of(config, [HostResources(name, 8, 12 * GIB) for name in "ab"])
    host = FakeHost()
    pool = await serve(host, n=1, placement=placements.taker("generator"))
    await pool.resize(2)
    assert len({actor.on for actor in host.started}) == 2
    with pytest.raises(Exception, match=r"no host has room for generator-2, .* 6\.00 GB"):
        await pool.resize(3)


@pytest.mark.parametrize("remote", [False, True])
async def test_no_key_is_in_the_environment_of_a_process(
    monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    monkeypatch.setenv("KEY_X", "secret")
    config = load_config(QUICKSTART, (*(AT_HOSTS if remote else ()), *PAID))
    placements = ProcessPlacements.of(
        config, [HostResources(name, 8, 16 * GIB) for name in "ab"] if remote else None
    )
    host = FakeHost()
    pools = Pools(config, cast(MeshHost, host), placements, Told())
    await pools.teachers()
    await pools.environments()
    for actor in host.started:
        assert (actor.on is not None) == remote
        assert actor.env is not None
        assert "KEY_X" not in actor.env
        assert TOKEN_ENV not in actor.env


def test_what_a_run_starts_inherits_none_of_its_keys() -> None:
    writer = ('sdpo.hints.writer="llm"', 'sdpo.hints.llm={kind="openrouter", model="m"}')
    config = load_config(QUICKSTART, (*AT_HOSTS, *PAID, *writer))
    environ = {"KEY_X": "x", "OPENROUTER_API_KEY": "o", "OTHER": "1"}
    with held_keys(config, environ) as held:
        assert environ == {"OTHER": "1"}
        assert held == {"KEY_X": "x", "OPENROUTER_API_KEY": "o"}
        assert "x" not in repr(held).replace("KEY_X", "")
    assert environ == {"KEY_X": "x", "OPENROUTER_API_KEY": "o", "OTHER": "1"}


def test_an_actor_gets_its_own_keys_and_no_others() -> None:
    writer = ('sdpo.hints.writer="llm"', 'sdpo.hints.llm={kind="openrouter", model="m"}')
    config = load_config(QUICKSTART, (*AT_HOSTS, *PAID, *writer))
    held = {"KEY_X": "x", "OPENROUTER_API_KEY": "o"}
    writers = keys_of(config, "hint_writer", held, "token")
    assert writers == {"OPENROUTER_API_KEY": "o", TOKEN_ENV: "token"}
    assert keys_of(config, "teacher_replay", held, "token") == {"KEY_X": "x", TOKEN_ENV: "token"}
    assert repr(writers) == f"Keys(OPENROUTER_API_KEY, {TOKEN_ENV})"
    assert pickle.loads(pickle.dumps(writers)) == writers


def test_no_proxy_is_asked_for_the_runs_own_experts() -> None:
    config = load_config(QUICKSTART, AT_HOSTS)
    environ = {ADDRESS: "10.0.0.5", "no_proxy": "internal"}
    told = proxy_env(config, "teacher_replay", environ)
    assert told == {"NO_PROXY": "internal,10.0.0.5", "no_proxy": "internal,10.0.0.5"}
    assert proxy_env(config, "generator", environ) == {}
