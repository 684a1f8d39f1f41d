"""The config of an offline replay: the run that the traces are from, and the teachers asked for.

Nothing is asked here and no key is read.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from composer_mesh.configs.load import Table, read_table, resolve_config
from composer_mesh.configs.schema import Config
from composer_mesh.services.offline.options import ReplayRefused
from composer_mesh.services.offline.traces import CONFIG_FILE

ON = 1.0
"""The weight of a channel whose run had it off; no offline figure depends on it."""

READ = {"run", "data", "environment", "policy", "generator", "trainer", "schedule", "replay"}
"""The sections of a run's config that matter here, or that others of these are checked against.

What else a run holds, of an older version too, is no reason not to replay it.
"""


class Origin(Protocol):
    """Where traces are from: a run's directory where one is known, and the name of their task."""

    @property
    def run(self) -> Path | None: ...

    @property
    def task(self) -> str: ...


def offline_config(
    traces: Origin,
    teachers: str | Sequence[Table] | None,
    overrides: Sequence[str] = (),
    max_usd: float | None = None,
    *,
    makes_pairs: bool = True,
) -> Config:
    """What to select, whom to ask and for how much; raises `ConfigError` or `ReplayRefused`.

    `teachers` are a TOML file, OpenRouter model ids with commas between them, or tables as in
    [[replay.teachers]]; None are those of the run. Task, seed and schedule are those of the traces'
    run, where one is known, so that the states are chosen as the run chose them. Where no pairs are
    to be made, one teacher is enough.
    """
    source, table = _with_teachers(traces, teachers)
    if not _section(table, "replay").get("teachers"):
        raise ReplayRefused(f"{source} names no teacher, so nobody can be asked: name some")
    weight = _section(table, "replay").get("beta") or ON
    settled: Table = {"beta": weight if makes_pairs else 0.0}
    if max_usd is not None:
        settled["budget"] = {"usd": float(max_usd)}
    return resolve_config(merged(table, {"replay": settled}), overrides, source)


def _with_teachers(traces: Origin, teachers: str | Sequence[Table] | None) -> tuple[str, Table]:
    """What an error calls the config, and its table."""
    table = _of_run(traces)
    if teachers is None and traces.run is None:
        raise ReplayRefused(
            "no teachers are given and the traces lie in no run directory, which would name some: "
            "add --teachers with a TOML file or OpenRouter model ids"
        )
    if teachers is None:
        return str(traces.run / CONFIG_FILE) if traces.run else "", table
    if not isinstance(teachers, str):
        return "the replay's config", merged(table, _asking_all(teachers))
    if _is_file(teachers):
        return teachers, _from_file(traces, table, Path(teachers))
    return "--teachers", merged(table, _asking_all(_openrouter(teachers)))


def merged(table: Table, over: Table) -> Table:
    """`over` laid on `table`: tables key by key, all else as a whole. Neither is changed."""
    result = dict(table)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            result[key] = merged(below, value)
        else:
            result[key] = _copied(value)
    return result


def _of_run(traces: Origin) -> Table:
    if traces.run is not None:
        written = read_table(traces.run / CONFIG_FILE)
        table = {name: section for name, section in written.items() if name in READ}
        # The model is not needed, and may have been removed since.
        _section(table, "policy").pop("path", None)
        return table
    return {"run": {"name": "replay", "steps": 1}, "data": {"kind": traces.task}}


def _is_file(teachers: str) -> bool:
    return teachers.endswith(".toml") or Path(teachers).is_file()


def _from_file(traces: Origin, table: Table, path: Path) -> Table:
    """A whole run lends its [replay]; other files are laid on the run's config.

    Where the traces have no run, a whole run is taken as theirs.
    """
    given = read_table(path)
    if "run" not in given:
        return merged(table, given)
    if traces.run is None:
        return given
    return {**table, "replay": given.get("replay", {})}


def openrouter_teacher(model: str) -> Table:
    """A teacher of OpenRouter by the id of its model; raises `ReplayRefused` for no such id."""
    if "/" not in model.strip("/"):
        raise ReplayRefused(
            f"teacher {model!r} is neither a TOML file nor an OpenRouter model id such as "
            "vendor/model: correct it"
        )
    return {"name": model, "kind": "openrouter", "model": model}


def _openrouter(ids: str) -> list[Table]:
    return [openrouter_teacher(model.strip()) for model in ids.split(",") if model.strip()]


def _asking_all(teachers: Sequence[Table]) -> Table:
    """Who is listed for this one job is asked about every state."""
    return {"replay": {"teachers": list(teachers), "ask": max(2, len(teachers))}}


def _section(table: Table, name: str) -> Table:
    section = table.get(name)
    return section if isinstance(section, dict) else {}


def _copied(value: Any) -> Any:
    """Lists and tables of a config as new ones, because overrides are put into them."""
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copied(inner) for inner in value]
    return value
