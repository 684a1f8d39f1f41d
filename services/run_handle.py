"""Runs from Python, the equal of the command line: started, followed, changed and stopped.

    run = train("quickstart", {"run.steps": 20})
    async for step in run:
        print(step["step"], step["reward/mean"])
    print(run.summary())

A run is a process of its own, which continues when the program that started it ends, and a
directory: `Run(directory)` finds it again. Imports neither torch nor Monarch. Nothing needs a
loop, so all of it works in a notebook, whose loop is running.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from composer_mesh.configs.load import Table, dump_toml, load_config, resolve_config
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.environment import python_module
from composer_mesh.mesh.processes import is_alive
from composer_mesh.mesh.programs import detached, reap, run
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.commands.training import refuse_or_set_aside
from composer_mesh.services.directory.claim import RUNS, holder
from composer_mesh.services.directory.report import METRICS_FILE, SUMMARY_FILE, read_metrics
from composer_mesh.services.directory.status import EVENTS_FILE, goes_on, read_status
from composer_mesh.services.launch.command import stop_command
from composer_mesh.services.scale_command import scale
from composer_mesh.services.sft.config import sft_config
from composer_mesh.services.store.reading import RunReader

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]

POLL_S = 0.2
LONGEST_MESSAGE = 2000
STOPPED = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit statuses of runs that finished or were stopped."""
LONGEST_EVALUATION_S = 14 * 86_400
"""Longest wait of a program that is run to its end."""


class RunFailed(RuntimeError):
    """The run's process ended with an error; the message has its last lines and the log's path."""


class Run:
    """A run by its directory, live or ended, of this program or of another."""

    def __init__(self, directory: Path | str, pid: int | None = None) -> None:
        self.directory, self._pid = Path(directory), pid
        self._exit: int | None = None

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"

    @property
    def live(self) -> bool:
        """Whether its process is running."""
        if self._pid is None:
            return goes_on(self.directory)
        return is_alive(self._pid)

    @property
    def log(self) -> Path:
        """The file with what a run of `train` or `sft` prints."""
        return self.directory.with_name(f"{self.directory.name}.log")

    def steps(self) -> list[dict[str, Any]]:
        """Return the metrics of each step so far, oldest first."""
        return read_metrics(self.directory / METRICS_FILE)

    def metrics(self) -> DataFrame:
        """Return the metrics of each step as a table, one row a step. Needs pandas."""
        try:
            from pandas import DataFrame
        except ModuleNotFoundError as missing:
            raise ImportError(
                "Run.metrics() needs pandas, which is not installed: pip install pandas, or use "
                "Run.steps()"
            ) from missing
        return DataFrame(self.steps())

    def events(self) -> list[dict[str, Any]]:
        """Return what happened so far: one object an event, oldest first."""
        return read_metrics(self.directory / EVENTS_FILE)

    def summary(self) -> dict[str, Any] | None:
        """Return the summary of the run; None before it has ended."""
        file = self.directory / SUMMARY_FILE
        return json.loads(file.read_bytes()) if file.exists() else None

    def rollouts(self) -> Iterator[Trace]:
        """Yield the stored rollouts, in the order in which their groups were finished."""
        with RunReader(self.directory) as reader:
            yield from reader.all_traces()

    def tree(self) -> dict[str, Any]:
        """Return the live mesh: hosts, processes, actors. Raises RunUnavailable after the end."""
        from composer_mesh.services.inspection.tree import Viewer

        return Viewer(self.directory).look()

    def scale(self, **replicas: int) -> dict[str, dict[str, int]]:
        """Change the number of replicas, such as `generator=3`; wait until they serve.

        Returns how many there were and are. Raises ControlRefused and RunUnavailable.
        """
        return _waited(scale(self.directory, **replicas))

    def stop(self, now: bool = False) -> int:
        """End the run after a checkpoint, or at once; wait for its end, return its exit status."""
        with ThreadPoolExecutor(1) as pool:  # apart from a loop that is running
            return pool.submit(stop_command, self.directory, now).result()

    def wait(self) -> Run:
        """Wait for the end of the run; raise RunFailed if it failed."""
        while self.live:
            time.sleep(POLL_S)
        return self._ended_well()

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the metrics of each step, as they come; raise RunFailed if the run fails."""
        seen = 0
        while True:
            live = self.live  # read first, so that the last steps are not missed
            steps = self.steps()
            for step in steps[seen:]:
                yield step
            seen = max(seen, len(steps))
            if not live:
                self._ended_well()
                return
            await asyncio.sleep(POLL_S)

    def _ended_well(self) -> Run:
        """Raise RunFailed unless the run finished or was stopped."""
        if self._pid is not None and self._exit is None:
            self._exit = reap(self._pid)
        if self._exit not in (None, *STOPPED):
            raise self._failed(
                "failed" if self._exit > 0 else f"was killed by signal {-self._exit}"
            )
        status = read_status(self.directory)
        if (
            self._exit is None
            and status is not None
            and status.state not in ("finished", "stopped")
        ):
            raise self._failed(f"ended while {status.state}")
        return self

    def _failed(self, how: str) -> RunFailed:
        said = self.log.read_text(errors="replace") if self.log.exists() else ""
        tail = said[-LONGEST_MESSAGE:].strip()
        return RunFailed(f"{self.directory} {how}, see {self.log}:\n{tail}")


def train(
    config: Config | Table | Path | str,
    changes: Mapping[str, Any] | None = None,
    *,
    output: Path | str | None = None,
    resume: bool = False,
) -> Run:
    """Start a run, as `composer-mesh train` does; return once its directory is claimed.

    Args:
        config: a preset's name, the path of a TOML file, its table, or a config.
        changes: values by key, as `{"run.steps": 3}`.
        output: directory of the run; `runs/NAME` when not given, from which an earlier run moves.
        resume: continue the run in that directory.

    Raises:
        ConfigError: the config is refused, with one line a problem.
        RunDirectoryError: the directory holds another run, or cannot be used.
        RunFailed: the run was refused before it claimed its directory.
    """
    return _start("train", _config(config, changes), output, resume)


def sft(
    config: Config | Table | Path | str,
    changes: Mapping[str, Any] | None = None,
    *,
    output: Path | str | None = None,
    resume: bool = False,
) -> Run:
    """Start supervised fine-tuning, as `composer-mesh sft` does; otherwise as `train`."""
    return _start("sft", _config(config, changes), output, resume)


def evaluate(
    target: Run | Path | str, changes: Mapping[str, Any] | None = None, *, samples: int = 1
) -> dict[str, Any]:
    """Evaluate a run, a model folder or a config, as `composer-mesh eval`; wait for the figures.

    Raises RunFailed with the command's message.
    """
    place = target.directory if isinstance(target, Run) else target
    with TemporaryDirectory(prefix="composer-mesh-") as folder:
        file = Path(folder) / "figures.json"
        command = ["eval", str(place), "--samples", str(samples), "--json", str(file)]
        command += [part for one in _overrides(changes) for part in ("--set", one)]
        done = run(
            python_module("composer_mesh", *command), deadline_s=LONGEST_EVALUATION_S, check=False
        )
        if done.status:
            raise RunFailed(done.stderr[-LONGEST_MESSAGE:].strip())
        figures: dict[str, Any] = json.loads(file.read_bytes())
    return figures


def _config(config: Config | Table | Path | str, changes: Mapping[str, Any] | None) -> Config:
    """Return the config with the changes; raise ConfigError before a process starts."""
    if isinstance(config, Path | str):
        return load_config(Path(config), _overrides(changes))
    table = (
        config.model_dump(mode="json", exclude_none=True) if isinstance(config, Config) else config
    )
    return resolve_config(table, _overrides(changes), "the config")


def _overrides(changes: Mapping[str, Any] | None) -> list[str]:
    return [f"{key}={_toml(value)}" for key, value in (changes or {}).items()]


def _toml(value: Any) -> str:
    """Write a value as `--set` reads it: JSON, but for the text of a path."""
    return str(value) if isinstance(value, Path) else json.dumps(value)


def _start(command: str, config: Config, output: Path | str | None, resume: bool) -> Run:
    named = sft_config(config) if command == "sft" else config
    place = RUNS / named.run.name if output is None else Path(output)
    if not resume:
        refuse_or_set_aside(place, named=output is not None)
    place.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="composer-mesh-") as folder:
        file = Path(folder) / "config.toml"
        file.write_text(dump_toml(config), encoding="utf-8")
        words = python_module("composer_mesh", command, str(file), "--output", str(place))
        started = Run(place)
        if not resume:
            started.log.unlink(missing_ok=True)
        started._pid = detached([*words, *(["--resume"] if resume else [])], started.log)
        while started.live and holder(place) != started._pid:
            time.sleep(POLL_S)
    if not started.live:
        raise started._failed("was refused")
    return started


def _waited(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end, also where a loop is running."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
