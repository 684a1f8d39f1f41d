"""What the batch job of a run asks Slurm for, and what it cannot have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from slurm_orders import Build, build

from composer_mesh.planning.host_capacity import HostResources
from composer_mesh.plugins.slurm.script import job_name, job_script, options_of, seconds_of
from composer_mesh.services.launch.ports import LaunchRefused

__all__ = ["build"]

GPUS = {"gpus": 4, "gpu_memory_gb": 80.0}


def test_a_job_asks_for_a_node_for_each_host_whole_and_as_large_as_described(build: Build) -> None:
    options = options_of(build(host=GPUS))
    assert {"--nodes=2", "--ntasks-per-node=1", "--exclusive", "--mincpus=8"} <= set(options)
    assert {"--mem=0", "--gres=gpu:4", "--signal=B:TERM@120", "--time=24:00:00"} <= set(options)
    assert {"--requeue", "--no-kill", "--open-mode=append"} <= set(options)


def test_a_job_that_shares_nodes_asks_only_for_what_is_described(build: Build) -> None:
    options = options_of(build(exclusive=False))
    assert {"--cpus-per-task=8", "--mem=65536M"} <= set(options)
    assert not {"--exclusive", "--mem=0", "--gres=gpu:0"} & set(options)


def test_a_job_names_its_partition_account_and_qos_only_where_they_are_set(build: Build) -> None:
    named = {"partition": "gpu", "account": "lab", "qos": "high"}
    given = [f"--{name}={value}" for name, value in named.items()]
    assert set(given) <= set(options_of(build(**named)))
    assert not [one for one in options_of(build()) if one.split("=")[0] in ("--partition", "--qos")]


def test_a_path_with_a_percent_sign_is_no_pattern_of_slurm(build: Build, tmp_path: Path) -> None:
    order = replace(build(), output=tmp_path / "100%j")
    assert f"--output={tmp_path}/100%%j/launch/slurm-%j.log" in options_of(order)


@pytest.mark.parametrize(
    ("name", "job"),
    [
        ("quickstart", "quickstart"),
        ("a b/c;d", "a-b-c-d"),
        ("..", "composer-mesh"),
        ("ä", "composer-mesh"),
    ],
)
def test_a_job_has_a_valid_name(name: str, job: str) -> None:
    assert job_name(name) == job


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("10", 600),
        ("10:30", 630),
        ("1:00:05", 3605),
        ("2-3", 2 * 86400 + 3 * 3600),
        ("1-00:30", 86400 + 1800),
        ("1-01:01:01", 86400 + 3661),
        ("0", None),
    ],
)
def test_a_time_limit_is_read_as_sbatch_reads_it(limit: str, seconds: int | None) -> None:
    assert seconds_of(limit) == seconds


def test_hosts_of_different_shapes_are_refused_with_both(build: Build) -> None:
    order = build()
    other = HostResources("cpu", 4, 2**30)
    with pytest.raises(LaunchRefused, match=r"gpu-0 with 8 cores.* and cpu with 4 cores"):
        options_of(replace(order, hosts=(order.hosts[0], other)))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"time_limit": "3", "grace_s": 120}, "time_limit is 3 .180 s. but must be above 180 s"),
        ({"partition": "a b"}, "partition is 'a b'"),
        ({"options": ["--array=1-3"]}, "several controllers"),
        ({"options": ["--time=5"]}, "cluster.slurm.time_limit"),
        ({"options": ["--nodes=5"]}, "placement.hosts decides"),
        ({"options": ["-N5"]}, "must be a whole option"),
        ({"options": ["--comment=a\n#SBATCH --array=3"]}, "of one line"),
        ({"setup": ["#SBATCH --array=3"]}, "cluster.slurm.options"),
    ],
)
def test_what_a_job_cannot_have_is_refused(
    build: Build, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(LaunchRefused, match=said):
        job_script(build(**settings))


def test_a_directory_that_slurm_cannot_name_is_refused(build: Build, tmp_path: Path) -> None:
    with pytest.raises(LaunchRefused, match="neither backslashes nor control"):
        job_script(replace(build(), output=tmp_path / "a\nb"))
