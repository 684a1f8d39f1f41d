"""Seats over several hosts: kept while their host is there, found anew where it is lost."""

from __future__ import annotations

from typing import Any

import pytest
from repository import ROOT
from rich.console import Console

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.failures import FailureClass, classify
from composer_mesh.mesh.machine import this_machine
from composer_mesh.mesh.process_resources import CORES, GPUS
from composer_mesh.planning.host_capacity import HostResources
from composer_mesh.planning.placement_solver import (
    ITS_MACHINE,
    NoCapacity,
    WrongHost,
    check_found,
    check_together,
)
from composer_mesh.services.inspection.placement_table import print_placement
from composer_mesh.services.pool.process_placement import ProcessPlacements, refuse_other_hosts

GIB = 2**30
QUICKSTART = ROOT / "configs" / "quickstart.toml"
WORKERS = 'cluster.workers=["tcp://10.0.0.5:1", "tcp://10.0.0.6:1"]'
AT_HOSTS = ('cluster.kind="hosts"', WORKERS)
SMALL = HostResources("a", 8, 16 * GIB), HostResources("b", 8, 16 * GIB)
WITH_GPUS = (
    HostResources("a", 8, 64 * GIB, 2, 24 * GIB),
    HostResources("b", 8, 64 * GIB, 2, 24 * GIB),
)


def run(*overrides: str, kind: tuple[str, ...] = AT_HOSTS) -> Config:
    return load_config(QUICKSTART, (*kind, *overrides))


def placements(*overrides: str, hosts: tuple[HostResources, ...] = SMALL) -> ProcessPlacements:
    return ProcessPlacements.of(run(*overrides), hosts)


def described(count: int = 2, **more: Any) -> str:
    about = {"name": "n", "count": count, "cores": 8, "memory_gb": 16} | more
    listed = ", ".join(f"{k}={v!r}".replace("'", '"') for k, v in about.items())
    return f"placement.hosts=[{{{listed}}}]"


def where(found: ProcessPlacements, kind: str, count: int) -> list[str | None]:
    return [found.take(kind, number).host for number in range(count)]


def test_processes_are_spread_over_the_hosts_and_two_stay_with_the_controller() -> None:
    found = placements("generator.replicas=2")
    assert set(where(found, "generator", 2)) == {"a", "b"}
    assert found.take("expert_server").host is None
    assert found.take("expert_server").env["OMP_NUM_THREADS"] == "1"
    staying = {one.process.name for one in found.placement.on(ITS_MACHINE)}
    assert staying == {"controller", "expert_server"}


def test_the_order_in_which_hosts_are_found_changes_nothing() -> None:
    hosts = tuple(HostResources(f"host-{number}", 8, 16 * GIB) for number in (10, 2, 0))
    first, other = (placements("generator.replicas=3", hosts=one) for one in (hosts, hosts[::-1]))
    assert first.placement == other.placement
    assert first.hosts == ("host-0", "host-2", "host-10")


def test_a_local_run_has_no_host_in_its_seats_and_the_environment_that_it_always_had() -> None:
    found = ProcessPlacements.of(load_config(QUICKSTART), found=this_machine)
    for placed in found.placement.placed:
        placement = found.take(placed.process.kind)
        assert (placement.host, placement.env) == (None, found.env(placed.process.kind))
    assert found.take("generator", 7).env == found.env("generator", 0)


def test_a_process_keeps_its_seat_at_every_start_while_its_host_is_there() -> None:
    found = placements("generator.replicas=4")
    before = where(found, "generator", 4)
    found.lose("nobody")
    assert where(found, "generator", 4) == before


def test_the_processes_of_a_lost_host_come_to_the_others_and_those_stay_where_they_are() -> None:
    found = placements("generator.replicas=4", "environment.replicas=4")
    before = {k: where(found, k, 4) for k in ("generator", "environment")}
    found.lose("a")
    assert found.hosts == ("b",)
    for kind in before:
        assert where(found, kind, 4) == ["b"] * 4
    found.join(HostResources("a", 8, 16 * GIB))
    assert where(found, "generator", 4) == ["b"] * 4, "nobody moves because a host came"
    assert found.take("generator", 4).host == "a", "what comes anew goes where least is to do"


def test_a_gpu_of_a_lost_host_is_not_taken_from_others_and_one_line_says_why() -> None:
    gpus = ("placement.trainer.gpus=1", "placement.generator.gpus=1")
    found = placements("trainer.ranks=2", "generator.replicas=2", *gpus, hosts=WITH_GPUS)
    assert where(found, "trainer", 2) == ["a", "a"]
    found.lose("a")
    with pytest.raises(NoCapacity) as refused:
        found.take("trainer", 0)
    said = str(refused.value)
    assert "\n" not in said
    assert "no host has room for trainer-0, which needs 1 GPU and " in said
    assert "b has 0 of its 2 GPUs free, 1 that no other rank has wanted" in said
    assert classify(refused.value) is FailureClass.INFRASTRUCTURE, "it may be tried again"
    found.join(HostResources("c", 8, 64 * GIB, 2, 24 * GIB))
    taken = [found.take("trainer", rank) for rank in range(2)]
    assert [(one.host, one.env[GPUS]) for one in taken] == [("c", "0"), ("c", "1")]


def test_the_gpus_that_are_free_are_given_to_who_moves() -> None:
    found = placements("trainer.ranks=2", "placement.trainer.gpus=1", hosts=WITH_GPUS)
    found.lose("a")
    taken = [found.take("trainer", rank) for rank in (1, 0)]
    assert [(one.host, one.env[GPUS]) for one in taken] == [("b", "0"), ("b", "1")]


def test_cores_of_its_own_are_those_that_nobody_owns() -> None:
    own = ("generator.threads=2", "placement.generator.cores=3", "generator.replicas=3")
    found = placements(
        *own, hosts=(HostResources("a", 8, 16 * GIB), HostResources("b", 7, 16 * GIB))
    )
    before = [(one.host, one.env[CORES]) for one in (found.take("generator", n) for n in range(3))]
    assert sorted(before) == [("a", "0,1,2"), ("a", "3,4,5"), ("b", "0,1,2")]
    found.lose("a")
    moved, last = (number for number in range(3) if before[number][0] == "a")
    assert found.take("generator", moved).env[CORES] == "3,4,5"
    with pytest.raises(NoCapacity, match="b has 1 of 7 cores without an owner, 3 wanted"):
        found.take("generator", last)
    assert found.take("environment", 9).env[CORES] == "6", "others run on what is left"


def test_memory_is_counted_also_for_who_comes_later() -> None:
    big = ("placement.environment.memory_gb=6", "environment.replicas=2")
    found = placements(*big, hosts=(HostResources("a", 8, 9 * GIB), HostResources("b", 8, 9 * GIB)))
    with pytest.raises(NoCapacity, match=r"environment-2, which needs 6\.00 GB of memory: a has "):
        found.take("environment", 2)


def test_no_host_at_all_is_said() -> None:
    found = placements()
    found.lose("a")
    found.lose("b")
    with pytest.raises(NoCapacity, match="no host is left; let another host join"):
        found.take("generator")


def test_a_host_of_another_name_has_what_was_wanted_of_the_one_that_was_lost() -> None:
    named = (described(), 'placement.generator.hosts=["n-1"]', 'placement.trainer.hosts=["n"]')
    found = ProcessPlacements.of(
        run(*named), (HostResources("n-0", 8, 16 * GIB), HostResources("n-1", 8, 16 * GIB))
    )
    assert found.take("generator").host == "n-1"
    found.lose("n-1")
    with pytest.raises(NoCapacity, match=r"n-0 is not among placement\.generator\.hosts"):
        found.take("generator")
    found.join(HostResources("spare", 8, 16 * GIB))
    assert found.take("generator").host == "spare"
    found.lose("n-0")
    assert found.take("trainer").host == "spare"


def test_a_host_is_there_once() -> None:
    found = placements()
    with pytest.raises(ValueError, match="host a is there already"):
        found.join(HostResources("a", 8, 16 * GIB))


def test_a_host_that_comes_back_under_its_name_has_nothing_of_before() -> None:
    found = placements("placement.trainer.gpus=1", hosts=WITH_GPUS)
    found.lose("a")
    found.join(HostResources("a", 8, 64 * GIB))
    assert found.take("trainer").host == "b"


@pytest.mark.plugins
@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_a_scheduler_must_be_told_the_sizes_of_its_hosts(kind: str) -> None:
    at = (f'cluster.kind="{kind}"',)
    with pytest.raises(WrongHost, match=f"describes no host but cluster.kind is '{kind}'.*count"):
        ProcessPlacements.of(run(kind=at))
    found = ProcessPlacements.of(run(described(), kind=at))
    assert [host.name for host in found.placement.hosts] == ["n-0", "n-1"]


@pytest.mark.plugins
def test_the_batch_jobs_controller_is_counted_on_its_first_host() -> None:
    found = ProcessPlacements.of(run(described(), kind=('cluster.kind="slurm"',)))
    placed = found.placement.named("controller")
    assert placed is not None
    assert placed.host == "n-0"
    assert found.take("expert_server").host is None


def test_each_worker_is_one_of_the_hosts_that_are_described() -> None:
    with pytest.raises(WrongHost, match=r"describes 3 hosts but cluster\.workers has 2 addresses"):
        ProcessPlacements.of(run(described(3)))
    assert ProcessPlacements.of(run(described(2))).notes == ()


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (('placement.controller.hosts=["n"]',), "placement.controller.hosts names 'n' but this"),
        (("placement.expert_server.cores=1",), "placement.expert_server.cores is 1 but this"),
    ],
)
def test_who_stays_with_the_controller_has_none_of_the_hosts(
    overrides: tuple[str, ...], why: str
) -> None:
    with pytest.raises(WrongHost, match=why):
        ProcessPlacements.of(run(described(), *overrides))


def test_the_hosts_that_are_there_have_what_is_described_and_the_names() -> None:
    config = run(described())
    both = HostResources("n-0", 9, 32 * GIB), HostResources("n-1", 8, int(15.8 * GIB))
    assert [host.cores for host in check_found(config, both).values()] == [8, 8]
    with pytest.raises(
        WrongHost, match=r"describes n-1: 8 cores, .* but what is there is n-1: 4 core"
    ):
        check_found(config, (both[0], HostResources("n-1", 4, 16 * GIB)))
    with pytest.raises(WrongHost, match=r"describes 2 hosts, but there are 1 \(n-0\): start one"):
        check_found(config, both[:1])
    with pytest.raises(WrongHost, match="describes 2 hosts, but there are 3"):
        check_found(config, (*both, HostResources("other", 8, 16 * GIB)))


def test_a_host_of_any_name_is_the_one_described_whose_figures_it_has() -> None:
    large = 'placement.hosts=[{name="s", cores=2, memory_gb=4}, {name="l", cores=8, memory_gb=16}]'
    config = run(large, 'placement.trainer.hosts=["l"]', 'placement.reference.hosts=["s"]')
    there = HostResources("node17", 8, 16 * GIB), HostResources("node18", 4, 8 * GIB)
    for order in (there, there[::-1]):
        assert {known: host.name for known, host in check_found(config, order).items()} == {
            "s": "node18",
            "l": "node17",
        }
    with pytest.raises(
        WrongHost, match=r"describes l: 8 cores, .* but what is there is a: 2 cores"
    ):
        check_found(config, (HostResources("a", 2, 4 * GIB), HostResources("b", 2, 4 * GIB)))
    found = ProcessPlacements.of(config, there)
    assert (found.take("trainer").host, found.take("reference").host) == ("node17", "node18")
    found.lose("node17")
    found.join(HostResources("node19", 8, 16 * GIB))
    assert found.take("trainer").host == "node19"


def test_a_remote_run_is_not_held_against_this_machine() -> None:
    refuse_other_hosts(run(described(2, cores=4096)))


def test_check_says_that_hosts_are_found_later_and_still_refuses_what_fits_nowhere() -> None:
    found = ProcessPlacements.of(run())
    console = Console(width=200)
    with console.capture() as shown:
        print_placement(found, console)
    assert "the hosts of the run are found when it is launched" in shown.get()
    assert "trainer" not in shown.get()
    with pytest.raises(ConfigError, match=r"placement\.trainer\.gpus is 2"):
        ProcessPlacements.of(run("placement.trainer.gpus=2"))


def test_the_table_shows_the_hosts_and_who_stays_with_the_controller() -> None:
    console = Console(width=200)
    with console.capture() as shown:
        print_placement(ProcessPlacements.of(run(described())), console)
    lines = shown.get().splitlines()
    (controller,) = (line for line in lines if " controller " in line)
    assert ITS_MACHINE in controller
    assert [line.split()[1] for line in lines if line.startswith(" all ")] == ["n-0", "n-1"]


TUNNEL = ('cluster.kind="hosts"', WORKERS, "cluster.ssh.tunnel=true")


def test_through_a_tunnel_the_ranks_of_the_trainer_stay_together() -> None:
    apart = ("trainer.ranks=2", "placement.trainer.gpus=1")
    one_gpu = (
        HostResources("a", 8, 64 * GIB, 1, 24 * GIB),
        HostResources("b", 8, 64 * GIB, 1, 24 * GIB),
    )
    with pytest.raises(WrongHost, match=r"the trainer's ranks are on 2 hosts but cluster\.ssh"):
        ProcessPlacements.of(run(*apart, kind=TUNNEL), one_gpu)
    assert ProcessPlacements.of(run(*apart), one_gpu).take("trainer", 1).host == "b"
    check_together(run(kind=TUNNEL), {"a"})


def test_through_a_tunnel_who_asks_the_runs_own_experts_stays_beside_them() -> None:
    found = ProcessPlacements.of(run(kind=TUNNEL), SMALL)
    assert found.take("teacher_replay").host is None
    assert found.take("generator").host is not None
    assert placements().take("teacher_replay").host is not None
