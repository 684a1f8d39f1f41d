"""Config of an offline replay: that of the traces' run, combined with the requested teachers.

No request is sent and no API key is read. Whom keys and money go to is decided by this account: the
teachers, the budget and the cache of a run's config count only if its signature says that a run of
this account wrote it, or if the viewer names that file with `--teachers`.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from composer_mesh.configs import plugins
from composer_mesh.configs.load import Table, read_table, resolve_config
from composer_mesh.configs.schema import Config
from composer_mesh.services.directory.claim import own_content
from composer_mesh.services.offline.options import ReplayRefused
from composer_mesh.services.offline.traces import CONFIG_FILE, TraceIndex

ON = 1.0
"""Weight for a channel that was off in the run; no offline figure depends on it."""

DECISIONS = {"budget", "cache"}
"""Keys of [replay] that a stranger's config does not decide, besides the teachers."""

READ = {"run", "data", "environment", "policy", "generator", "trainer", "schedule", "replay"}
"""Config sections that the replay needs, or that those are validated against.

Other sections, which may be of an older version, cannot prevent a replay.
"""


OF_A_MODEL = (
    *("path", "sizes", "tool_calls", "tools_in", "stop_tokens", "chat_date"),
    "chat_template_options",
)
"""Keys of [policy] that are about a model in its path, which no replay needs."""


def offline_config(
    traces: TraceIndex,
    teachers: str | Sequence[Table] | None,
    overrides: Sequence[str] = (),
    max_usd: float | None = None,
    *,
    makes_pairs: bool = True,
) -> Config:
    """Build the config of a replay; raise `ConfigError` or `ReplayRefused`.

    `teachers` is a TOML file, comma-separated OpenRouter model ids, or tables as in
    [[replay.teachers]]; None uses those of the run. Task, seed and schedule are those of the
    traces' run, if known, so that the same states are selected. With `makes_pairs` False one
    teacher suffices.
    """
    source, table = _with_teachers(traces, teachers)
    if not _section(table, "replay").get("teachers"):
        raise ReplayRefused(_nobody(traces, teachers, source))
    weight = _section(table, "replay").get("beta") or ON
    settled: Table = {"beta": weight if makes_pairs else 0.0}
    if max_usd is not None:
        settled["budget"] = {"usd": float(max_usd)}
    return resolve_config(merged(table, {"replay": settled}), overrides, source)


def _nobody(traces: TraceIndex, teachers: object, source: str) -> str:
    """Say why there is no teacher."""
    if teachers is None and traces.run is not None:
        path = traces.run / CONFIG_FILE
        if _own_config(path) is None:
            return (
                f"{path} was not written by a run of this account, so teachers that it names get "
                "no request and no key: name a file of yours with --teachers, or that one if you "
                "have checked its teachers and keys"
            )
    return f"{source} names no teacher, so nobody can be queried: name some"


def _with_teachers(traces: TraceIndex, teachers: str | Sequence[Table] | None) -> tuple[str, Table]:
    """Return the config's name for error messages, and its table."""
    table = _of_run(traces)
    if teachers is None and traces.run is None:
        raise ReplayRefused(
            "no teachers are given and the traces are not in a run directory, which would name "
            "some: add --teachers with a TOML file or OpenRouter model ids"
        )
    if teachers is None:
        return str(traces.run / CONFIG_FILE) if traces.run else "", table
    if not isinstance(teachers, str):
        return "the replay's config", merged(table, _asking_all(teachers))
    if _is_file(teachers):
        return teachers, _from_file(traces, table, Path(teachers))
    return "--teachers", merged(table, _asking_all(_openrouter(teachers)))


def merged(table: Table, over: Table) -> Table:
    """Return `table` updated by `over`, tables recursively; the inputs are unmodified."""
    result = dict(table)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            result[key] = merged(below, value)
        else:
            result[key] = _copied(value)
    return result


def _of_run(traces: TraceIndex) -> Table:
    if traces.run is None:
        return {"run": {"name": "replay", "steps": 1}, "data": {"task": traces.task}}
    own = _own_config(traces.run / CONFIG_FILE)
    written = read_table(traces.run / CONFIG_FILE) if own is None else own
    table = {name: section for name, section in written.items() if name in READ}
    # The model is not needed, and may have been removed since.
    policy = _section(table, "policy")
    for key in OF_A_MODEL:
        policy.pop(key, None)
    return table if own is not None else _without_decisions(table)


def _own_config(path: Path) -> Table | None:
    """Return the config that a run of this account wrote; None for any other one."""
    content = own_content(path)
    return None if content is None else tomllib.loads(content.decode())


def _without_decisions(table: Table) -> Table:
    """Remove what a stranger does not decide; builtin teachers stay, as they get no request."""
    replay = _section(table, "replay")
    teachers = replay.get("teachers")
    builtin = isinstance(teachers, list) and all(
        isinstance(one, dict) and one.get("kind") == "builtin" for one in teachers
    )
    left_out = DECISIONS if builtin else {*DECISIONS, "teachers"}
    kept = {key: value for key, value in replay.items() if key not in left_out}
    _section(table, "policy").pop("cache_dir", None)
    _refuse_code(_section(table, "data"))
    return {**table, "replay": kept}


def _refuse_code(data: Table) -> None:
    """Raise ReplayRefused where a stranger's config names a task that would be imported."""
    mixed = data.get("mixture")
    tables = [data, *(mixed if isinstance(mixed, list) else [])]
    named = [table.get("task") for table in tables if isinstance(table, dict)]
    for task in named:
        if isinstance(task, str) and task not in plugins.own("tasks"):
            raise ReplayRefused(
                f"the run of another account names the task {task[:80]!r}, whose code would be "
                "run: copy its config, read that code, and name the copy with --teachers"
            )


def _is_file(teachers: str) -> bool:
    return teachers.endswith(".toml") or Path(teachers).is_file()


def _from_file(traces: TraceIndex, table: Table, path: Path) -> Table:
    """Read a config file: of a complete run config only [replay] is used, other files are merged.

    If the traces have no run, a complete run config is used as theirs.
    """
    given = read_table(path)
    if "run" not in given:
        return merged(table, given)
    if traces.run is None:
        return given
    return {**table, "replay": given.get("replay", {})}


def openrouter_teacher(model: str) -> Table:
    """Return an OpenRouter teacher by model id; raise `ReplayRefused` for an invalid id."""
    if "/" not in model.strip("/"):
        raise ReplayRefused(
            f"teacher {model!r} is neither a TOML file nor an OpenRouter model id such as "
            "vendor/model: correct it"
        )
    return {"name": model, "kind": "openrouter", "model": model}


def _openrouter(ids: str) -> list[Table]:
    return [openrouter_teacher(model.strip()) for model in ids.split(",") if model.strip()]


def _asking_all(teachers: Sequence[Table]) -> Table:
    """Query all teachers of this job about every state."""
    return {"replay": {"teachers": list(teachers), "ask": max(2, len(teachers))}}


def _section(table: Table, name: str) -> Table:
    section = table.get(name)
    return section if isinstance(section, dict) else {}


def _copied(value: Any) -> Any:
    """Copy lists and tables of a config, because overrides modify them in place."""
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copied(inner) for inner in value]
    return value
