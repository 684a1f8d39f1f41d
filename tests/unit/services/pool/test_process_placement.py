"""Processes are told their placement; a run starts on the host where it is placed.

Replicas start at their placement, and restart where a host has capacity.
"""

import pickle
import re
from pathlib import Path
from typing import Any, cast

import pytest
from fake_host import FakeHost, serve, until
from repository import ROOT
from rich.console import Console

from composer_mesh.actors.experts.http import TOKEN_ENV
from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.process_resources import ADDRESS, CORES, GPU_SHARE, GPUS
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.planning.host_capacity import HostResources
from composer_mesh.planning.placement_solver import CannotPlace, WrongHost
from composer_mesh.services.checks.keys import held_keys, keys_of
from composer_mesh.services.inspection.placement_table import print_placement, ranges
from composer_mesh.services.pool.process_placement import (
    NoPlacement,
    ProcessPlacement,
    ProcessPlacements,
    refuse_other_hosts,
)
from composer_mesh.services.pool.replicas import RestartRules
from composer_mesh.services.run.pools import Pools, proxy_env

GIB = 2**30
QUICKSTART = ROOT / "configs" / "quickstart.toml"
SERVER = HostResources("server", 16, 64 * GIB, 4, 24 * GIB)


def run(*overrides: str) -> Config:
    return load_config(QUICKSTART, overrides)


def placements(*overrides: str, host: HostResources = SERVER) -> ProcessPlacements:
    return ProcessPlacements.of(run(*overrides), found=lambda: host)


def test_each_process_has_the_threads_of_its_kind() -> None:
    found = placements("generator.threads=3")
    assert found.env("generator")["OMP_NUM_THREADS"] == "3"
    assert found.env("environment")["OMP_NUM_THREADS"] == "1"


def test_each_rank_and_replica_is_told_its_own_gpu_and_cores() -> None:
    found = placements(
        "trainer.ranks=2",
        "generator.replicas=2",
        "placement.trainer.gpus=1",
        "placement.trainer.cores=2",
        "placement.generator.gpus=0.5",
    )
    told = [found.env(kind, number) for kind in ("trainer", "generator") for number in range(2)]
    assert [env[GPUS] for env in told] == ["0", "1", "2", "2"]
    assert [env[CORES] for env in told] == ["0,1", "2,3", *2 * [",".join(map(str, range(4, 16)))]]
    assert [env.get(GPU_SHARE) for env in told] == [None, None, "0.5", "0.5"]


def test_a_process_without_a_gpu_is_told_that_it_has_none() -> None:
    assert placements("placement.trainer.gpus=1").env("environment")[GPUS] == ""


def test_more_replicas_share_what_others_share_but_have_no_gpu_of_their_own() -> None:
    assert placements().env("generator", 5) == placements().env("generator", 0)
    found = placements("placement.generator.gpus=1")
    assert found.env("generator", 0)[GPUS] == "0"
    with pytest.raises(NoPlacement, match="generator-1 needs a GPU of its own"):
        found.env("generator", 1)


def test_what_was_found_is_said_and_what_is_described_is_not_looked_for() -> None:
    assert placements().notes[0].startswith("found server: 16 cores, 64.0 GB, 4 GPUs of 24.0 GB")
    described = run('placement.hosts=[{name="a", cores=2, memory_gb=8}]')

    def nobody() -> HostResources:
        raise AssertionError("a described host was looked for")

    assert ProcessPlacements.of(described, found=nobody).notes == ()


MODEL = (
    "policy.path=./models/none",
    'policy.sizes={model_type="llama", hidden_size=4096, intermediate_size=14336,'
    "vocab_size=128256, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8}",
)


def test_declared_sizes_stand_for_a_folder_that_is_not_there_and_that_is_said() -> None:
    config = load_config(QUICKSTART, MODEL, model_later=True)
    with pytest.raises(ConfigError, match=r"trainer needs of its host: .* master weights 29\.9 "):
        ProcessPlacements.of(config, found=lambda: SERVER)
    found = ProcessPlacements.of(config, found=lambda: HostResources("large", 16, 999 * GIB))
    assert (
        "models/none is not there: its sizes are policy.sizes, nothing else checked" in found.notes
    )


TEACHER = (
    "sdpo.teacher=model",
    "sdpo.teacher_model.path=models/large",
    MODEL[1].replace("policy.sizes", "sdpo.teacher_model.sizes"),
)
"""An SDPO teacher of 8 billion parameters; the policy is the preset's small one."""


@pytest.mark.parametrize("placement", ["mesh", "inline"])
def test_the_memory_of_another_model_as_teacher_is_where_it_runs(placement: str) -> None:
    overrides = (*TEACHER, f"sdpo.placement={placement}")
    config = load_config(QUICKSTART, overrides, model_later=True)
    found = ProcessPlacements.of(config, found=lambda: HostResources("large", 16, 999 * GIB))
    told = "models/large is not there: its sizes are sdpo.teacher_model.sizes"
    assert any(note.startswith(told) for note in found.notes)
    kind = "sdpo_teacher" if placement == "mesh" else "trainer"
    of_kind = [one.process.host_bytes for one in found.placement.of_kind(kind)]
    assert min(of_kind) > 4 * 8e9
    others = [one.process for one in found.placement.placed if one.process.kind != kind]
    assert max(one.host_bytes for one in others) < 4 * GIB
    what = "weights 29.9" if placement == "mesh" else "SDPO teacher 3"
    with pytest.raises(ConfigError, match=re.escape(what)):
        ProcessPlacements.of(config, found=lambda: HostResources("small", 16, 16 * GIB))


def test_a_teacher_of_unknown_make_is_left_out_of_the_sums_and_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    found = placements("sdpo.teacher=model", f"sdpo.teacher_model.path={tmp_path}")
    assert any("memory of the SDPO teacher's model is not in" in note for note in found.notes)


def test_a_folder_that_is_not_there_is_no_run() -> None:
    with pytest.raises(ConfigError, match="must be a model folder"):
        load_config(QUICKSTART, MODEL)
    with pytest.raises(ConfigError, match="must be a model folder"):
        load_config(QUICKSTART, MODEL[:1], model_later=True)


def test_declared_sizes_must_be_those_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 9,'
        '"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}'
    )
    config = load_config(QUICKSTART, (f"policy.path={tmp_path}", MODEL[1]))
    with pytest.raises(ConfigError, match="declares vocab_size = 128256 but it is 9 of "):
        ProcessPlacements.of(config, found=lambda: SERVER)


def test_a_model_of_unknown_make_is_left_out_of_the_sums_and_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    found = ProcessPlacements.of(run(f"policy.path={tmp_path}"), found=lambda: SERVER)
    assert any("memory of models is not in these sums" in note for note in found.notes)


TWO = 'placement.hosts=[{name="a", count=2, cores=8, memory_gb=16}]'
LARGE = 'placement.hosts=[{name="a", cores=8, memory_gb=16, gpus=8, gpu_memory_gb=24}]'


@pytest.mark.parametrize(
    ("described", "why"),
    [
        (TWO, "describes 2 hosts, but a run is started on this machine"),
        (LARGE, "8 GPUs of 24.0 GB"),
    ],
)
def test_a_run_starts_only_on_the_host_that_is_described(described: str, why: str) -> None:
    with pytest.raises(WrongHost, match=why):
        refuse_other_hosts(run(described), lambda: SERVER)


def test_a_host_may_have_more_than_is_described() -> None:
    refuse_other_hosts(run('placement.hosts=[{name="a", cores=8, memory_gb=64.5}]'), lambda: SERVER)
    refuse_other_hosts(run(), lambda: SERVER)


def test_the_table_has_every_process_uncut_also_where_a_terminal_is_narrow() -> None:
    console = Console(width=40, record=True)
    with console.capture() as shown:
        print_placement(placements("placement.trainer.gpus=1", "replay.actors=12"), console)
    text = shown.get()
    for name in ("controller", "trainer", "teacher_replay-11", "expert_server"):
        assert f" {name} " in text
    assert "1 / 4" in text
    assert "…" not in text


def test_cores_are_written_as_ranges() -> None:
    assert ranges([]) == ""
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


BIG = ("policy.hidden_size=512", "policy.layers=8", "trainer.microbatch_tokens=16384")


def with_gb(gb: float) -> HostResources:
    return HostResources("small", 16, int(gb * GIB))


def test_activations_are_recomputed_only_where_memory_is_short_and_that_is_said() -> None:
    roomy, short = (placements(*BIG, host=with_gb(gb)) for gb in (60, 6))
    assert (roomy.recomputes, short.recomputes) == (False, True)
    assert not any("activation_checkpointing" in note for note in roomy.notes)
    (note,) = [note for note in short.notes if "activation_checkpointing" in note]
    assert "is 'auto' and on: without it, reference fits on no host" in note


@pytest.mark.parametrize("gb", [6, 60])
def test_checkpointing_that_a_config_states_is_kept(gb: float) -> None:
    on, off = (f"trainer.activation_checkpointing={one}" for one in ("true", "false"))
    assert not placements(*BIG, on, host=with_gb(gb)).recomputes
    if gb == 6:
        with pytest.raises(CannotPlace, match="reference fits on no host"):
            placements(*BIG, off, host=with_gb(gb))
    else:
        assert not placements(*BIG, off, host=with_gb(gb)).recomputes


def test_a_run_that_checkpointing_does_not_help_is_refused_without_naming_it() -> None:
    with pytest.raises(CannotPlace) as refused:
        placements(*BIG, host=with_gb(2))
    assert "activation_checkpointing" not in str(refused.value)


def test_memory_given_to_the_trainer_is_kept_by_recomputing_too() -> None:
    assert placements(*BIG, "placement.trainer.memory_gb=3", host=with_gb(60)).recomputes


def test_teams_of_more_threads_than_cores_are_said_with_the_keys_to_lower() -> None:
    two = HostResources("two", 2, 64 * GIB)
    found = placements("trainer.threads=2", host=two)
    (note,) = [note for note in found.notes if "wait for each other" in note]
    assert "two has 2 cores but its models compute with" in note
    assert "trainer 1 x 2" in note
    assert note.endswith("lower trainer.threads")
    for fine in (placements(host=two), placements("trainer.threads=2")):
        assert not any("wait for each other" in note for note in fine.notes)


AT_HOSTS = ('cluster.kind="hosts"', 'cluster.workers=["tcp://10.0.0.5:1", "tcp://10.0.0.6:1"]')
TEACHER_TABLE = (
    '{name="NAME", kind="openai", base_url="http://x/v1", model="m", api_key_env="KEY_NAME",'
    "prompt_usd_per_million=1, completion_usd_per_million=1}"
)
PAID = (
    f"replay.teachers=[{TEACHER_TABLE.replace('NAME', 'X')}, {TEACHER_TABLE.replace('NAME', 'Y')}]",
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
