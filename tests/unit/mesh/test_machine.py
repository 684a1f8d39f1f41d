"""What a machine has is what a container or a batch system lets this process use of it."""

import os
from pathlib import Path

import psutil
import pytest

from composer_mesh.mesh.machine import cores, memory, this_machine, visible

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
