"""A process takes exactly the cores and GPUs that it was told, and computes on them.

What a machine has is what a container or a batch system lets this process use of it.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from composer_mesh.mesh.device import ALLOCATOR, NoGpuHere, own_device
from composer_mesh.mesh.machine import cores, memory, this_machine, visible
from composer_mesh.mesh.process_resources import (
    ShareMissing,
    bind,
    own_gpu_share,
    own_gpus,
    return_freed_memory,
    share_env,
    take_share,
)


@pytest.fixture
def own_cores() -> Iterator[list[int]]:
    """The cores of this process, given back afterwards."""
    before = os.sched_getaffinity(0)
    yield sorted(before)
    bind(before)


def test_threads_bound_every_library_that_counts_them() -> None:
    env = share_env(3)
    assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "3"


def test_a_process_is_bound_to_its_cores_by_the_count_of_what_it_may_use(
    own_cores: list[int],
) -> None:
    began = threading.Event()
    ended = threading.Event()
    other = threading.Thread(target=lambda: (began.set(), ended.wait()))
    other.start()
    began.wait()
    take_share(share_env(1, cores=[len(own_cores) - 1]))
    found = [os.sched_getaffinity(one) for one in (0, other.native_id or 0)]
    ended.set()
    other.join()
    assert found == 2 * [{own_cores[-1]}]


def test_a_process_without_cores_of_its_own_may_use_all(own_cores: list[int]) -> None:
    take_share(share_env(1))
    assert sorted(os.sched_getaffinity(0)) == own_cores


def test_a_core_that_is_not_there_is_refused(own_cores: list[int]) -> None:
    beyond = len(own_cores)
    with pytest.raises(ShareMissing, match=f"core {beyond} was given .* use {beyond}, "):
        take_share(share_env(1, cores=[beyond]))
    assert sorted(os.sched_getaffinity(0)) == own_cores


@pytest.mark.parametrize(
    ("before", "gpus", "seen"),
    [
        (None, [], ""),
        (None, [1, 3], "1,3"),
        ("4,5,6", [0, 2], "4,6"),
        ("GPU-aa, MIG-bb", [1], "MIG-bb"),
        ("4,5", [], ""),
    ],
)
def test_a_process_sees_its_own_gpus_by_the_names_that_its_host_has_for_them(
    before: str | None, gpus: list[int], seen: str
) -> None:
    environ = share_env(1, gpus=gpus) | ({} if before is None else {"CUDA_VISIBLE_DEVICES": before})
    take_share(environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == seen


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ShareMissing, match=r"GPU 2 was given to this process, but .* use 2, "):
        take_share(share_env(1, gpus=[2]) | {"CUDA_VISIBLE_DEVICES": "0,1"})


def test_outside_of_a_placement_nothing_changes() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "7"}
    take_share(environ)
    assert environ == {"CUDA_VISIBLE_DEVICES": "7"}
    assert own_gpus(environ) == []


def test_the_share_of_a_gpu_arrives() -> None:
    assert own_gpu_share(share_env(1, gpus=[0], gpu_share=0.35)) == 0.35
    assert own_gpu_share(share_env(1, gpus=[0])) == 1
    assert own_gpus(share_env(1, gpus=[0, 2])) == [0, 2]


def test_without_gpus_the_device_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMPOSER_MESH_GPUS", raising=False)
    assert own_device() == torch.device("cpu")
    monkeypatch.setenv("COMPOSER_MESH_GPUS", "")
    assert own_device() == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_torch_does_not_find_is_no_reason_to_take_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COMPOSER_MESH_GPUS", "5")
    with pytest.raises(NoGpuHere, match=r"gives this process GPU 5 .* torch finds no CUDA device"):
        own_device()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_a_process_with_a_gpu_computes_on_the_first_that_it_sees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COMPOSER_MESH_GPUS", "0")
    assert own_device() == torch.device("cuda", 0)


def test_gpu_memory_grows_in_expandable_segments_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COMPOSER_MESH_GPUS", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for given in ({}, {"PYTORCH_ALLOC_CONF": "a:1"}, {"PYTORCH_CUDA_ALLOC_CONF": "b:2"}):
        for name in ALLOCATOR:
            monkeypatch.setenv(name, "")  # so that what is set below ends with the test
            monkeypatch.delenv(name)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        assert own_device() == torch.device("cuda", 0)
        found = {name: os.environ[name] for name in ALLOCATOR if name in os.environ}
        assert found == (given or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_a_process_that_was_forked_after_torchs_import_has_expandable_segments() -> None:
    source = """
import os, torch
from composer_mesh.mesh.device import own_device
os.environ["COMPOSER_MESH_GPUS"], os.environ["COMPOSER_MESH_GPU_SHARE"] = "0", "0.1"
if child := os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
kept = torch.zeros(1 << 20, device=own_device())
assert all(one["is_expandable"] for one in torch.cuda.memory_snapshot())
try:
    torch.zeros(torch.cuda.mem_get_info()[1] // 5, dtype=torch.uint8, device=own_device())
except torch.OutOfMemoryError:
    raise SystemExit(0)
raise SystemExit("more than the share was given")
"""
    environ = {name: os.environ[name] for name in os.environ if name not in ALLOCATOR}
    subprocess.run([sys.executable, "-c", source], env=environ, check=True, timeout=120)


def test_freed_memory_between_what_lives_goes_back_to_the_host() -> None:
    piece = 100_000  # bytes: below what the C library maps by itself
    live = [bytearray(piece) for _ in range(4000)]
    live = live[::40]
    before = psutil.Process().memory_info().rss
    return_freed_memory()
    assert before - psutil.Process().memory_info().rss > 3000 * piece
    assert len(live) == 100


GIB = 2**30
WHOLE = psutil.virtual_memory().total


def machine(root: Path, **files: str) -> Path:
    """A root folder with these files; double underscores are slashes, dots are `_dot_`."""
    (root / "proc/self").mkdir(parents=True)
    for name, text in files.items():
        file = root / name.replace("__", "/").replace("_dot_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_without_groups_all_of_the_machine_is_there(tmp_path: Path) -> None:
    root = machine(tmp_path)
    assert memory(root) == WHOLE
    assert cores(root) == len(os.sched_getaffinity(0))


def test_the_smallest_limit_of_the_groups_around_a_process_counts(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        proc__self__cgroup="0::/slice/job\n",
        sys__fs__cgroup__slice__job__memory_dot_max="max\n",
        sys__fs__cgroup__slice__memory_dot_max=f"{GIB // 4}\n",
        sys__fs__cgroup__slice__job__cpu_dot_max="150000 100000\n",
    )
    assert memory(root) == GIB // 4
    assert cores(root) == min(2, len(os.sched_getaffinity(0)))


def test_groups_of_the_first_version_count_too(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        proc__self__cgroup="4:memory:/box\n5:cpu,cpuacct:/box\n",
        sys__fs__cgroup__memory__box__memory_dot_limit_in_bytes=f"{GIB // 3}\n",
        sys__fs__cgroup__cpu__box__cpu_dot_cfs_quota_us="100000\n",
        sys__fs__cgroup__cpu__box__cpu_dot_cfs_period_us="100000\n",
    )
    assert memory(root) == GIB // 3
    assert cores(root) == 1


def test_a_group_without_a_limit_is_none(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        proc__self__cgroup="4:memory:/\n5:cpu:/\n",
        sys__fs__cgroup__memory__memory_dot_limit_in_bytes="9223372036854771712\n",
        sys__fs__cgroup__cpu__cpu_dot_cfs_quota_us="-1\n",
        sys__fs__cgroup__cpu__cpu_dot_cfs_period_us="100000\n",
    )
    assert memory(root) == WHOLE
    assert cores(root) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("environ", "seen"),
    [
        ({}, [80, 24, 48]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, [48, 80]),
        ({"CUDA_VISIBLE_DEVICES": "0,9,1"}, [80]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-ab,GPU-cd"}, [24, 24]),
    ],
)
def test_gpus_are_those_that_cuda_would_see(environ: dict[str, str], seen: list[int]) -> None:
    assert visible([80, 24, 48], environ) == seen


def test_this_machine_is_a_host_that_something_fits_on() -> None:
    here = this_machine()
    assert here.cores >= 1
    assert here.memory > GIB
    assert bool(here.gpus) == bool(here.gpu_memory)
