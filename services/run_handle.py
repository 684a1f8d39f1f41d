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
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from composer_mesh.configs.errors import ConfigError
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
        changes: values by key, as `{"run.steps": 3}`. Here and in a table a class, such as a task,
            is named by its file.
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
        command = ["eval", str(place), "--samples", str(samples), "--report", str(file)]
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
        config.model_dump(mode="json", exclude_none=True)
        if isinstance(config, Config)
        else _plain("config", config)
    )
    return resolve_config(table, _overrides(changes), "the config")


def _overrides(changes: Mapping[str, Any] | None) -> list[str]:
    """Write values as `--set` reads them: JSON, but for the text of a path."""
    return [
        f"{key}={value if isinstance(value, Path) else json.dumps(_plain(key, value))}"
        for key, value in (changes or {}).items()
    ]


def _plain(key: str, value: Any) -> Any:
    """Return a value as TOML has it, a class by its file; raise ConfigError for others."""
    if isinstance(value, Mapping):
        return {name: _plain(f"{key}.{name}", one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(key, one) for one in value]
    if isinstance(value, type):
        return _path_of(key, value)
    if callable(value):
        raise ConfigError(
            f"{key} is the function {getattr(value, '__name__', value)!r}: write it to a module, "
            f"set {key} to 'my_module.my_function', and run.import_paths to the module's folder"
        )
    return str(value) if isinstance(value, Path) else value


def _path_of(key: str, kind: type) -> str:
    """Return the path by which a run's processes import a class."""
    name = kind.__qualname__
    file = Path(getattr(sys.modules[kind.__module__], "__file__", None) or "<stdin>")
    if not (file.is_file() and name.isidentifier()):
        where = "inside another name" if file.is_file() else "of a notebook cell or standard input"
        raise ConfigError(
            f"{key} is the class {kind.__name__} {where}, which the processes of the run cannot "
            "import: write it to a file, as %%writefile my_task.py does in a notebook, and set "
            f"{key} to 'my_task.py:{kind.__name__}'"
        )
    return f"{file.absolute()}:{name}"


def _refuse_inside_of_a_run() -> None:
    """Raise RuntimeError in a process of a run: its task's file would start one run after another.

    Those processes are programs of this package, while users start runs from their own.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name.partition(".")[0] == __name__.partition(".")[0]:
        raise RuntimeError(
            "a process of a run has called composer_mesh.train or sft while it imported your file: "
            'put the call below `if __name__ == "__main__":`'
        )


def _start(command: str, config: Config, output: Path | str | None, resume: bool) -> Run:
    _refuse_inside_of_a_run()
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
