"""The registry: what a command line or a config can name, by kind, and where it is implemented.

Tables of strings map a kind and a name to an import path `module:object`: `CORE` of the core,
`plugins/NAME/plugin.py` of each plugin. Other packages register in their metadata, by
entry points of the group `composer_mesh.KIND`. Those are read once, and only where Python installs
packages, so that metadata in a working directory or in `run.import_paths` registers nothing.

Reading the tables imports nothing that they name; `load` imports what is requested.
"""

import importlib
import pkgutil
import site
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from pydantic import AfterValidator

from composer_mesh.configs.errors import did_you_mean, nearest

KINDS = (
    *("commands", "config_sections", "tasks", "engines", "trackers", "launchers", "channels"),
    *("step_hooks", "reward_servers", "checks", "trees", "sandboxes", "tool_servers", "telemetry"),
)
PLUGINS = "composer_mesh.plugins"
GROUPS = "composer_mesh."
"""What the groups of entry points begin with, before a kind."""
Table = Mapping[str, Mapping[str, str]]

_COMMANDS = "composer_mesh.services.commands"

CORE: Table = {
    "commands": {
        "check": f"{_COMMANDS}.training:check",
        "explain": f"{_COMMANDS}.explain:explain",
        "presets": f"{_COMMANDS}.presets:presets",
        "train": f"{_COMMANDS}.training:train",
        "sft": f"{_COMMANDS}.training:sft",
        "eval": f"{_COMMANDS}.evaluation:evaluate",
        "replay": f"{_COMMANDS}.rollouts:replay",
        "tree": f"{_COMMANDS}.inspection:tree",
        "events": f"{_COMMANDS}.inspection:events",
        "traces": f"{_COMMANDS}.rollouts:traces",
        "stop": f"{_COMMANDS}.clusters:stop",
        "scale": f"{_COMMANDS}.inspection:scale",
        "reward": f"{_COMMANDS}.rollouts:reward",
        "stacks": f"{_COMMANDS}.inspection:stacks",
        "tui": f"{_COMMANDS}.inspection:tui",
        "verify": f"{_COMMANDS}.inspection:verify",
        "launch": f"{_COMMANDS}.clusters:launch",
        "worker": f"{_COMMANDS}.clusters:worker",
        "join": f"{_COMMANDS}.clusters:join",
    },
    "tasks": {
        "toolbox": "composer_mesh.tasks.toolbox:ToolboxTask",
        "gsm8k": "composer_mesh.tasks.gsm8k:Gsm8kTask",
    },
    "channels": {
        "echo": "composer_mesh.channels.echo:Echo",
    },
    "engines": {
        "embedded": "composer_mesh.actors.engines.embedded:start",
        "vllm": "composer_mesh.actors.engines.vllm_start:start",
    },
    "sandboxes": {
        "bubblewrap": "composer_mesh.mesh.sandboxes.probes:open_sandbox",
    },
    "launchers": {
        "local": "composer_mesh.services.launch.by_ssh:HostsLauncher",
        "hosts": "composer_mesh.services.launch.by_ssh:HostsLauncher",
    },
}
"""What the core registers."""


class Registration(NamedTuple):
    """Where something is implemented, as `module:object`, and who registers it."""

    path: str
    owner: str

    def load(self) -> Any:
        """Import it."""
        return pkgutil.resolve_name(self.path)


class RegistrationError(ValueError):
    """A name that nobody registers, or that several do."""


class PluginFailed(Exception):
    """Something registered cannot continue, and the message says all about it."""


def own(kind: str) -> Mapping[str, Registration]:
    """Return what the core and its plugins register."""
    return _own()[kind]


def names(kind: str) -> list[str]:
    """Return all names of a kind, those of other packages last."""
    return [*own(kind), *sorted(name for name in _others()[kind] if name not in own(kind))]


def find(kind: str, name: str) -> str | None:
    """Return the import path of a name, or None; raise RegistrationError if several register it."""
    found = [*filter(None, [own(kind).get(name)]), *_others()[kind].get(name, ())]
    if len(found) > 1:
        first, second, *_ = found
        raise RegistrationError(
            f"{name!r} of {kind} is {first.path} of {first.owner}, but {second.owner} registers it "
            f"as {second.path}, and no name is replaced: uninstall {second.owner}"
        )
    return found[0].path if found else None


def require(kind: str, name: str) -> str:
    """Return the import path of a name; raise RegistrationError if nobody registers it."""
    if (path := find(kind, name)) is None:
        if near := nearest(name, names(kind)):
            repair = did_you_mean(near)
        elif kind == "commands":
            repair = f"composer-mesh --help lists the commands{missing()}"
        else:
            repair = f"write one of {known(kind)}"
        what = "not a command" if kind == "commands" else "not registered"
        raise RegistrationError(f"{name!r} is {what}: {repair}")
    return path


def load(kind: str, name: str) -> Any:
    """Import what a name stands for; raise RegistrationError if nobody registers it."""
    return pkgutil.resolve_name(require(kind, name))


def registered(kind: str) -> AfterValidator:
    """Return the check of a config's key whose value is a registered name."""
    return AfterValidator(lambda name: require(kind, name) and name)


def known(kind: str) -> str:
    """Return the part of a message that lists the names of a kind."""
    return f"the {kind} {', '.join(names(kind))}{missing()}"


def missing() -> str:
    """Return the part of a message that says that the folder of plugins is missing, if it is."""
    return "" if _plugins() else f" ({PLUGINS} is missing, so names of plugins are unknown)"


@cache
def _own() -> Mapping[str, dict[str, Registration]]:
    found: dict[str, dict[str, Registration]] = {kind: {} for kind in KINDS}
    tables = {"the core": CORE}
    for one in _plugins():
        tables[f"the plugin {one}"] = importlib.import_module(f"{PLUGINS}.{one}.plugin").TABLE
    for owner, table in tables.items():
        for kind, entries in table.items():
            found[kind].update({name: Registration(path, owner) for name, path in entries.items()})
    return found


@cache
def _plugins() -> tuple[str, ...]:
    try:
        package = importlib.import_module(PLUGINS)
    except ModuleNotFoundError:
        return ()
    return tuple(one.name for one in pkgutil.iter_modules(package.__path__) if one.ispkg)


@cache
def _others() -> Mapping[str, Mapping[str, list[Registration]]]:
    found: dict[str, dict[str, list[Registration]]] = {kind: {} for kind in KINDS}
    for kind, name, registration in _entry_points():
        registered = found[kind].setdefault(name, [])
        if registration not in registered:  # one package may be in two folders
            registered.append(registration)
    return found


def _entry_points() -> Iterator[tuple[str, str, Registration]]:
    """Yield kind, name and registration of each entry point of the packages that are installed."""
    from importlib.metadata import distributions

    folders = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    for package in distributions(path=folders):
        for entry in package.entry_points:
            kind = entry.group.removeprefix(GROUPS)
            if kind in KINDS and kind != entry.group:
                path = f"{entry.module}:{entry.attr}"
                yield kind, entry.name, Registration(path, f"the package {package.name}")
