"""`composer-mesh islands`: starts islands, shows their progress, and sums them up.

All refusals come before anything is written. Islands need nothing of this process once they run:
when it is killed they continue, and `--resume` starts those that have ended too early.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.plugins.islands.jobs.by_launch import LaunchExecutor
from composer_mesh.plugins.islands.jobs.directory import (
    IslandsDirectory,
    MeetBy,
    islands_in,
    summarize,
    summary_table,
    write_summary,
)
from composer_mesh.plugins.islands.jobs.hf_jobs import HfJobs
from composer_mesh.plugins.islands.jobs.jobs import JobCloud, JobExecutor, JobOptions
from composer_mesh.plugins.islands.jobs.modal_sandboxes import ModalSandboxes
from composer_mesh.plugins.islands.jobs.ports import Executor, IslandReplica, IslandState
from composer_mesh.plugins.islands.rounds.torchft_rules import check_lighthouse
from composer_mesh.plugins.islands.store.opening import StoreUnfit, open_store
from composer_mesh.services.checks.accepting import (
    UsageError,
    accept,
    listed,
    startable,
    use_umask,
)
from composer_mesh.services.directory.claim import RUNS, refuse_a_used, refuse_outward_links
from composer_mesh.services.directory.resume import (
    RunFinished,
    may_be_resumed,
    pinned,
    refuse_unfit,
)
from composer_mesh.services.directory.sft_start import started
from composer_mesh.services.launch.command import refuse_a_live
from composer_mesh.services.launch.ports import LaunchFailed
from composer_mesh.services.schedule.stopping import CommandSignals, grace_s

LAUNCH = "launch"
CLOUDS: Mapping[str, Callable[[str | None], JobCloud]] = {
    HfJobs.name: HfJobs,
    ModalSandboxes.name: ModalSandboxes,
}
"""The clouds by their names in `--on`; each gets the `--namespace`."""
OF_JOBS = ("image", "hardware", "secret", "volume", "timeout_h", "namespace")
"""Options that say what a job is made of."""


def executor_of(arguments: argparse.Namespace, root: Path) -> Executor:
    """Return what starts the islands of a directory; raises `UsageError` for unfit options."""
    if arguments.on == LAUNCH:
        given = [name for name in OF_JOBS if getattr(arguments, name)]
        if given:
            raise UsageError(
                f"--{given[0].replace('_', '-')} is for jobs of a cloud, but --on is {LAUNCH}: "
                f"remove it, or add --on {' or '.join(CLOUDS)}"
            )
        return LaunchExecutor()
    if arguments.image is None:
        raise UsageError(
            f"--on is {arguments.on} but --image is missing: name an image with composer-mesh, "
            "such as registry.example/composer-mesh:0.2"
        )
    if arguments.store is None:
        raise UsageError(
            f"--on is {arguments.on} but --store is missing: what jobs record comes back through "
            "it, such as s3://bucket/run"
        )
    if arguments.store.startswith("file:"):
        raise UsageError(
            f"--store is {arguments.store!r}, but jobs of {arguments.on} see no folder of this "
            "machine: give an address such as s3://bucket/run"
        )
    if arguments.timeout_h is not None and not arguments.timeout_h > 0:
        raise UsageError(f"--timeout-h is {arguments.timeout_h:g} but must be above 0")
    options = JobOptions(
        arguments.image,
        arguments.hardware,
        tuple(arguments.secret or ()),
        arguments.volume,
        None if arguments.timeout_h is None else arguments.timeout_h * 3600,
    )
    try:
        cloud = CLOUDS[arguments.on](arguments.namespace)
        cloud.check(options)
    except LaunchFailed as failed:
        raise UsageError(f"--on is {arguments.on}, but {failed}") from failed
    return JobExecutor(cloud, root, options, _secrets(options.secrets))


def _secrets(names: tuple[str, ...]) -> Mapping[str, str]:
    for name in names:
        if not os.environ.get(name):
            raise UsageError(
                f"--secret {name} names a variable that is not set here: export it, or leave it out"
            )
    return {name: os.environ[name] for name in names}


FAILED = 1
POLL_S = 1.0


def islands_command(arguments: argparse.Namespace, signals: CommandSignals) -> int:
    """Start islands and follow them; return 0 if all have finished, 1 if one has not.

    With --detach it returns when they are started. A signal stops them with a checkpoint.
    """
    configs = configs_of(arguments)
    place = _place(arguments, configs[0])
    executor = executor_of(arguments, place.root)
    replicas = replicas_of(configs, place, arguments)
    if not replicas:
        return 0
    if arguments.dry_run:
        executor.dry_run(replicas)
        return 0
    _connect(executor, place, arguments.on)
    place.root.mkdir(parents=True, exist_ok=True)
    refuse_outward_links(place.root)
    place.write()
    signals.hold()
    executor.launch_replicas(replicas)
    _say(f"{len(replicas)} islands are started; look at them with: {_tree(place.root)}")
    if arguments.detach:
        return 0
    return _follow(executor, replicas, place, signals)


def configs_of(arguments: argparse.Namespace) -> list[Config]:
    """Return the accepted config of each island, by rank; one file serves for all of them."""
    count, files = arguments.n, arguments.config
    if count < 1:
        raise UsageError(f"-n is {count} but must be a number of islands from 1 on")
    if len(files) not in (1, count):
        raise UsageError(
            f"-n is {count} but {len(files)} configs are given: give one for all islands, or one "
            "for each"
        )
    configs: list[Config] = []
    for rank in range(count):
        by, address = _meet(arguments)
        own = (f"islands.{by}={address}", f"islands.rank={rank}")
        overrides = [*arguments.set, *own, f"islands.world_size={count}"]
        config = started(load_config(files[rank % len(files)], overrides))
        run = config.run.model_copy(update={"name": f"{config.run.name}-{rank}"})
        config = config.model_copy(update={"run": run})
        if arguments.resume:
            config = pinned(config, _place(arguments, configs[0] if rank else config).run(rank))
        configs.append(listed(config))
    for config in configs if len(files) > 1 else configs[:1]:
        accept(config)
        startable(config, here=False)
    use_umask(configs[0])
    return configs


def replicas_of(
    configs: Sequence[Config], place: IslandsDirectory, arguments: argparse.Namespace
) -> list[IslandReplica]:
    """Return the islands to start: all, or with --resume those that have not finished.

    Raises for a directory that holds other runs.
    """
    replicas = []
    for rank, config in enumerate(configs):
        if arguments.only is not None and rank != arguments.only:
            continue
        run = place.run(rank)
        refuse_a_live(run)
        resume = arguments.resume and may_be_resumed(run)
        try:
            if resume:
                refuse_unfit(run, config)
            else:
                refuse_a_used(run)
        except RunFinished as finished:
            _say(f"island {rank}: nothing to do: {finished}")
            continue
        replicas.append(IslandReplica(rank, config, run, resume))
    return replicas


def _place(arguments: argparse.Namespace, config: Config) -> IslandsDirectory:
    name = config.run.name.removesuffix("-0")
    root: Path = (arguments.output or RUNS / f"{name}-islands").absolute()
    if arguments.only is not None and not 0 <= arguments.only < arguments.n:
        raise UsageError(
            f"--only is {arguments.only} but -n is {arguments.n}: give a rank from 0 to "
            f"{arguments.n - 1}"
        )
    by, address = _meet(arguments)
    requested = IslandsDirectory(root, address, arguments.n, by)
    found = islands_in(root)
    if found is not None and found != requested:
        raise UsageError(
            f"{root} has {found.count} islands that meet in {found.address}, but -n is "
            f"{arguments.n} and --{by} is {address}: give the same, or another --output"
        )
    return requested


def _meet(arguments: argparse.Namespace) -> tuple[MeetBy, str]:
    """Return by what the islands meet, and its address."""
    if arguments.lighthouse is not None:
        return "lighthouse", str(arguments.lighthouse)
    return "store", str(arguments.store)


def _connect(executor: Executor, place: IslandsDirectory, executor_name: str) -> None:
    """Check where the islands meet, and what starts them; raises `UsageError`."""
    try:
        store = None
        if place.by == "store":
            store = open_store(place.address)
        else:
            check_lighthouse(place.address)
        executor.connect(store)
    except StoreUnfit as unfit:
        raise UsageError(f"--{place.by} {unfit}") from unfit
    except LaunchFailed as failed:
        raise UsageError(f"--on is {executor_name}, but {failed}") from failed


def _follow(
    executor: Executor,
    replicas: Sequence[IslandReplica],
    place: IslandsDirectory,
    signals: CommandSignals,
) -> int:
    """Print what changes until all islands have ended; then print and write the summary."""
    began, shown, cancelled = time.monotonic(), dict[int, IslandState](), False
    while True:
        states = executor.poll()
        shown = _show(states, shown)
        if all(one.ended for one in states):
            break
        if signals.status and not cancelled:
            _say("the islands write a checkpoint and stop")
            executor.cancel(max(grace_s(one.config) for one in replicas))
            cancelled = True
        time.sleep(POLL_S)
    summary = summarize(place, states, time.monotonic() - began)
    write_summary(place.root, summary)
    Console().print(summary_table(summary))
    for state in states:
        if state.state == "failed":
            _say(f"island {state.rank} failed: {state.cause}")
        elif state.cause:
            _say(f"island {state.rank}: {state.cause}")
    if any(one.state == "failed" for one in states):
        return FAILED
    return signals.status


def _show(states: Sequence[IslandState], shown: dict[int, IslandState]) -> dict[int, IslandState]:
    for one in states:
        if shown.get(one.rank) != one:
            sys.stdout.write(f"island {one.rank}: {one.state}, step {one.step}\n")
    sys.stdout.flush()
    return {one.rank: one for one in states}


def _tree(root: Path) -> str:
    return f"composer-mesh tree {shlex.quote(str(root))}"


def _say(text: str) -> None:
    sys.stderr.write(f"composer-mesh: {text}\n")
