"""Every process gets what it asked for and nobody else has, or the run is refused with its sum.

The plan of the mesh follows the channels and the counts of the config.

The number of rollout workers grows with the episodes in flight, up to a bound.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repository import ROOT

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.load import load_config
from composer_mesh.planning.host_capacity import WHOLE, HostResources, Placed, Process
from composer_mesh.planning.memory import GB, SHARED_CODE, MemoryTerm, total
from composer_mesh.planning.memory_estimate import Memory
from composer_mesh.planning.mesh_layout import MeshPlan, plan_mesh, rollout_workers
from composer_mesh.planning.model_sizes import sizes_of
from composer_mesh.planning.placement_solver import CannotPlace, Placement, place, place_processes

QUICKSTART = ROOT / "configs" / "quickstart.toml"


KINDS = ("trainer", "generator", "environment", "sdpo_teacher")


@st.composite
def processes(draw: st.DrawFn) -> tuple[Process, ...]:
    found = []
    for number in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(KINDS))
        gpus = draw(st.sampled_from([0, 0, 250, 333, 500, 700, 1000, 2000, 4000]))
        gpus = 0 if kind == "environment" else gpus
        on_gpu = (MemoryTerm("weights", draw(st.integers(0, 12)) * GB),) if gpus else ()
        takes = draw(st.sampled_from([0.0, 0.9])) * min(gpus, WHOLE) / WHOLE
        found.append(
            Process(
                f"p-{number}",
                kind,
                threads=draw(st.integers(1, 4)),
                memory=Memory(
                    (MemoryTerm("process", draw(st.integers(0, 6)) * GB),), on_gpu, takes
                ),
                cores=draw(st.sampled_from([0, 0, 1, 2, 5])),
                gpus=gpus,
                hosts=draw(st.sampled_from([(), (), ("h0",), ("h1", "h2")])),
                together=bool(gpus),
            )
        )
    return tuple(found)


@st.composite
def hosts(draw: st.DrawFn) -> tuple[HostResources, ...]:
    return tuple(
        HostResources(
            f"h{number}",
            draw(st.integers(1, 12)),
            draw(st.integers(1, 40)) * GB,
            gpus := draw(st.sampled_from([0, 1, 4, 8])),
            16 * GB if gpus else 0,
        )
        for number in range(draw(st.integers(1, 3)))
    )


def placed(run: tuple[Process, ...], on: tuple[HostResources, ...]) -> Placement | str:
    try:
        return place_processes(run, on)
    except CannotPlace as refused:
        return str(refused)


def check_gpus(host: HostResources, there: tuple[Placed, ...]) -> None:
    shares: Counter[int] = Counter()
    memory: Counter[int] = Counter()
    ranks: Counter[int] = Counter()
    for one in there:
        assert len(set(one.gpus)) == len(one.gpus) == -(-one.process.gpus // WHOLE)
        for number in one.gpus:
            shares[number] += min(one.process.gpus, WHOLE)
            memory[number] += one.gpu_bytes
            ranks[number] += one.process.kind == "trainer"
            may_take = one.process.memory.takes * host.gpu_memory or one.gpu_bytes
            assert total(one.process.memory.gpu) <= min(one.gpu_bytes, may_take)
            assert one.gpu_bytes <= one.gpu_share * host.gpu_memory
    assert all(number in range(host.gpus) for number in shares)
    assert all(share <= WHOLE for share in shares.values())
    assert all(held <= host.gpu_memory for held in memory.values())
    assert all(count <= 1 for count in ranks.values())


def check_cores(host: HostResources, there: tuple[Placed, ...]) -> None:
    own = [core for one in there if one.process.cores for core in one.cores]
    assert len(set(own)) == len(own) == sum(one.process.cores for one in there)
    assert all(core in range(host.cores) for core in own)
    for one in there:
        if not one.process.cores and own:
            assert one.cores
            assert set(one.cores) == set(range(host.cores)) - set(own)
        if not own:
            assert one.cores == ()


@given(processes(), hosts())
def test_nothing_is_given_twice_and_everyone_is_placed_or_the_run_is_refused(
    run: tuple[Process, ...], on: tuple[HostResources, ...]
) -> None:
    found = placed(run, on)
    assert placed(run, on) == found
    if isinstance(found, str):
        assert any(f"{one.name} fits on no host" in found for one in run)
        assert "all GB of memory" in found
        assert "repair: " in found
        assert all(host.name in found for host in on)
        return
    assert [one.process for one in found.placed] == list(run)
    for one in found.placed:
        assert not one.process.hosts or one.host in one.process.hosts
    for host in on:
        there = found.on(host.name)
        check_gpus(host, there)
        check_cores(host, there)
        asked = sum(one.process.host_bytes for one in there)
        assert not there or asked + SHARED_CODE <= host.memory


@given(st.integers(1, 3), st.integers(0, 8), st.integers(1, 12))
def test_whole_gpus_are_refused_only_when_there_are_fewer_than_asked_for(
    count: int, gpus: int, ranks: int
) -> None:
    on = tuple(
        HostResources(f"h{n}", 4, 999 * GB, gpus, 16 * GB if gpus else 0) for n in range(count)
    )
    memory = Memory((), (MemoryTerm("weights", GB),))
    run = tuple(Process(f"t-{n}", "trainer", 1, memory, gpus=WHOLE) for n in range(ranks))
    assert isinstance(placed(run, on), Placement) == (ranks <= count * gpus)


def on(*described: HostResources, overrides: tuple[str, ...] = ()) -> Placement:
    found = load_config(QUICKSTART, overrides)
    return place(found, described, sizes_of(found.policy))


LAPTOP = HostResources("laptop", 2, 4 * GB)


SERVER = HostResources("server", 16, 64 * GB, 4, 24 * GB)


def test_the_quickstart_fits_the_laptop_that_its_comment_names() -> None:
    found = on(LAPTOP)
    assert [one.process.name for one in found.placed][:3] == [
        "controller",
        "trainer",
        "generator-0",
    ]
    assert all(one.cores == () and one.gpus == () for one in found.placed)


def test_too_little_memory_is_refused_with_every_term_of_the_sum() -> None:
    with pytest.raises(CannotPlace) as refused:
        on(HostResources("tiny", 2, 2 * GB))
    text = str(refused.value)
    assert "of 2.00 GB of memory left" in text
    for kind in ("controller", "trainer", "generator", "sdpo_teacher", "teacher_replay 2 x"):
        assert kind in text.split("all GB of memory: ")[1]


def test_a_model_that_no_gpu_holds_is_refused_with_its_parts() -> None:
    with pytest.raises(
        CannotPlace, match=r"may use 0\.01 x 24\.0 = 0\.24 GB each, 2\.\d+ GB"
    ) as no:
        on(SERVER, overrides=("placement.trainer.gpus=0.01",))
    assert "trainer needs of each GPU: CUDA 1.50 + activations" in str(no.value)
    assert "or raise placement.trainer.gpus" in str(no.value)


def test_a_repair_names_only_what_the_run_does_not_do_yet() -> None:
    tight = ("placement.trainer.gpus=0.01",)
    with pytest.raises(CannotPlace, match=r"set trainer\.activation_checkpointing to true, set tr"):
        on(SERVER, overrides=tight)
    done = ("trainer.activation_checkpointing=true", "trainer.compute_dtype=bfloat16")
    with pytest.raises(CannotPlace, match=r"lower trainer\.microbatch_tokens, or raise placement"):
        on(SERVER, overrides=(*tight, *done))


def test_ranks_fill_one_host_before_the_next_and_share_no_gpu() -> None:
    two = (SERVER, HostResources("other", 16, 64 * GB, 4, 24 * GB))
    found = on(*two, overrides=("trainer.ranks=6", "placement.trainer.gpus=0.5"))
    ranks = [one for one in found.placed if one.process.kind == "trainer"]
    assert [(one.host, one.gpus) for one in ranks] == [
        *(("server", (number,)) for number in range(4)),
        ("other", (0,)),
        ("other", (1,)),
    ]


def test_shares_of_a_gpu_are_given_to_different_kinds() -> None:
    shares = ("placement.trainer.gpus=0.6", "placement.generator.gpus=0.4")
    found = on(HostResources("one", 4, 16 * GB, 1, 24 * GB), overrides=shares)
    trainer, generator = found.named("trainer"), found.named("generator-0")
    assert trainer is not None
    assert generator is not None
    assert (trainer.gpus, trainer.gpu_share) == ((0,), 0.6)
    assert (generator.gpus, generator.gpu_share) == ((0,), 0.4)


def test_a_core_stays_for_those_who_have_none_of_their_own() -> None:
    overrides = ("placement.trainer.cores=2",)
    with pytest.raises(
        CannotPlace, match="has 2 of 2 cores without an owner, 2 wanted, and 1 must"
    ):
        on(LAPTOP, overrides=overrides)


def test_processes_without_a_gpu_go_where_there_is_least_to_do() -> None:
    two = (HostResources("a", 4, 64 * GB), HostResources("b", 8, 64 * GB))
    found = on(*two, overrides=("environment.replicas=9",))
    count = Counter(one.host for one in found.placed)
    assert 0 < count["a"] < count["b"]


HOSTS = (
    'placement.hosts=[{name="n", count=2, cores=8, memory_gb=16}, '
    '{name="m", cores=8, memory_gb=16}]'
)


@pytest.mark.parametrize(
    ("wanted", "where"), [("n", {"n-0", "n-1"}), ("n-1", {"n-1"}), ("m", {"m"})]
)
def test_hosts_are_named_one_by_one_or_all_that_are_alike(wanted: str, where: set[str]) -> None:
    described = tuple(HostResources(name, 8, 16 * GB) for name in ("n-0", "n-1", "m"))
    overrides = (HOSTS, f'placement.environment.hosts=["{wanted}"]', "environment.replicas=6")
    found = on(*described, overrides=overrides)
    assert {one.host for one in found.placed if one.process.kind == "environment"} == where


@pytest.mark.parametrize(
    ("override", "why"),
    [
        (
            "placement.trainer.gpus=2",
            "computes on one GPU: set it to 1 or less, and raise trainer.r",
        ),
        ("placement.trainer.gpus=1.5", "above 1 must be a whole number"),
        ("placement.generator.cores=1", "cores is 1 but its processes compute with 2 threads each"),
        ("placement.trainer.memory_gb=0.25", "memory_gb is 0.25 but such a process needs about 0"),
        ('placement.trainer.hosts=["far"]', "names 'far' but .* describes none, so this machine"),
        ('placement.hosts=[{name="a",cores=1,memory_gb=1,gpus=1}]', "a GPU without memory"),
        (
            'placement.hosts=[{name="a",cores=1,memory_gb=1},{name="a",cores=1,memory_gb=1}]',
            "hosts has 'a' several times",
        ),
    ],
)
def test_what_could_never_be_is_refused_on_any_host(override: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        on(SERVER, overrides=("generator.threads=2", override))


def test_memory_that_is_given_counts_in_place_of_the_estimate() -> None:
    found = on(SERVER, overrides=("placement.trainer.memory_gb=40",))
    trainer = found.named("trainer")
    assert trainer is not None
    assert trainer.process.host_bytes == 40 * GB
    with pytest.raises(CannotPlace, match="trainer 40"):
        on(SERVER, overrides=("placement.trainer.memory_gb=40", "placement.reference.memory_gb=40"))


def plan(*overrides: str) -> MeshPlan:
    return plan_mesh(load_config(QUICKSTART, overrides))


def kinds(*overrides: str) -> list[str]:
    return [row.kind for row in plan(*overrides).actors]


FREE = "prompt_usd_per_million = 0.0, completion_usd_per_million = 0.0"


def test_the_quickstart_has_every_kind_of_actor() -> None:
    assert kinds() == [
        "trainer",
        "generator",
        "environment",
        "rollouts",
        "sdpo_teacher",
        "teacher_replay",
        "reference",
        "expert_server",
    ]
    assert "reference" not in kinds("replay.loss=simpo")


def test_a_channel_of_weight_zero_has_no_actors() -> None:
    assert "sdpo_teacher" not in kinds("sdpo.alpha=0")
    assert kinds("replay.beta=0") == [
        *("trainer", "generator", "environment", "rollouts", "sdpo_teacher")
    ]


def test_a_channel_of_weight_zero_has_no_transport() -> None:
    off = plan("sdpo.alpha=0", "replay.beta=0")
    assert [row.what for row in off.transports] == ["weights", "requests and handles"]
    assert off.transports[0].targets == ("generator",)
    assert [channel.on for channel in off.channels] == [True, False, False]


def test_weights_travel_from_the_trainer_to_all_who_read_them() -> None:
    assert str(plan().transports[0]).startswith(
        "weights: trainer -> generator, sdpo_teacher: shared memory"
    )


def test_another_model_as_teacher_is_told_and_gets_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    shown = plan("sdpo.teacher=model", f"sdpo.teacher_model.path={tmp_path}")
    assert str(shown.transports[0]).startswith("weights: trainer -> generator: shared memory")
    (teacher,) = [row for row in shown.actors if row.kind == "sdpo_teacher"]
    assert teacher.role.endswith(f"as the model in {tmp_path}")


def test_a_backend_is_told() -> None:
    trainer = plan("trainer.backend.import_path=mine:Backend").actors[0]
    assert trainer.role.endswith("of the model of mine:Backend")


def test_the_expert_server_is_there_only_for_builtin_teachers() -> None:
    remote = f'kind = "openai", model = "m", base_url = "http://localhost:1/v1", {FREE}'
    teachers = ", ".join(f'{{name = "{name}", {remote}}}' for name in "abc")
    assert "expert_server" not in kinds(f"replay.teachers=[{teachers}]")


def test_the_states_go_to_each_address_once() -> None:
    remote = f'{{name = "c", kind = "openai", model = "m", base_url = "https://host/v1", {FREE}}}'
    local = ", ".join(f'{{name = "{name}", kind = "builtin"}}' for name in "ab")
    states = plan(f"replay.teachers=[{local}, {remote}]").transports[2]
    assert states.targets == ("expert_server", "https://host/v1")


def test_the_totals_count_every_process_and_thread() -> None:
    wide = plan("generator.replicas=3", "generator.threads=2", "replay.actors=4")
    assert wide.processes == plan().processes + 2 + 2
    assert wide.threads == plan().threads + (3 * 2 - 1) + 2
    (generator,) = [row for row in wide.actors if row.kind == "generator"]
    assert (generator.replicas, generator.processes, generator.threads) == (3, 3, 2)


@pytest.mark.parametrize(
    ("prompts", "size", "lag", "workers"),
    [(4, 4, 0, 1), (16, 16, 0, 1), (16, 16, 1, 2), (129, 2, 0, 2), (1000, 64, 3, 16)],
)
def test_there_is_a_worker_for_every_256_episodes_in_flight_and_32_at_most(
    build_config: Any, prompts: int, size: int, lag: int, workers: int
) -> None:
    schedule = {"prompts_per_step": prompts, "group_size": size, "max_lag": lag}
    evaluation = {"episodes": 1}
    assert rollout_workers(build_config(schedule=schedule, eval=evaluation)) == workers


def test_a_stated_number_of_workers_is_kept(build_config: Any) -> None:
    assert rollout_workers(build_config(rollouts={"workers": 3})) == 3
