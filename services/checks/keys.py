"""Checks that the API keys that a config refers to are present, before anything is started.

Does not check that a provider accepts them. `held_keys` keeps them out of the environment that the
processes of a run inherit; the actors that use them receive them as an argument.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, MutableMapping

from composer_mesh.actors.experts.http import TOKEN_ENV
from composer_mesh.actors.provider.endpoint import Keys
from composer_mesh.configs.schema import Config
from composer_mesh.configs.teachers import ChatEndpoint

ASKING = ("teacher_replay", "hint_writer", "judge")
"""Kinds of processes that query model APIs."""
HOLDING = (*ASKING, "environment")
"""Kinds of processes that receive keys: environments receive those of MCP servers."""


class MissingKey(Exception):
    """An API key is missing where the config says; the message says the repair."""


def check_keys(config: Config, environ: Mapping[str, str] = os.environ) -> None:
    """Raise `MissingKey` for the first endpoint of the run without its key."""
    for teacher in config.replay.teachers if config.replay.on else ():
        _check(teacher, f"teacher {teacher.name!r}", environ)
    writer = config.sdpo.hints.active_writer if config.asks_for_hints else None
    if writer is not None:
        _check(writer, "the hint writer", environ)
    check_judge_keys(config, environ)


def check_judge_keys(config: Config, environ: Mapping[str, str] = os.environ) -> None:
    """Raise `MissingKey` for the first judge without its key."""
    for judge in config.judges.models:
        _check(judge, f"judge {judge.name!r}", environ)


@contextlib.contextmanager
def held_keys(config: Config, environ: MutableMapping[str, str] = os.environ) -> Iterator[Keys]:
    """Take the keys of a run out of the environment while the block runs; yield them.

    The processes that are started in the block do not inherit them.
    """
    held = {name: environ.pop(name) for name in all_key_variables(config) if name in environ}
    try:
        yield Keys(held)
    finally:
        environ.update(held)


def keys_of(config: Config, kind: str, held: Mapping[str, str], token: str) -> Keys:
    """Return those of the run's keys that a kind of process uses, with the experts' token."""
    own = {name: held[name] for name in key_variables(config, kind) if name in held}
    if kind == "environment":
        return Keys(own)
    return Keys({**own, TOKEN_ENV: token})


def all_key_variables(config: Config) -> list[str]:
    """Return the names of the variables with the keys of a run."""
    return sorted({name for kind in HOLDING for name in key_variables(config, kind)})


def key_variables(config: Config, kind: str) -> list[str]:
    """Return the names of the variables whose keys a kind of process uses."""
    if kind == "environment":
        return [name for server in config.environment.mcp for name in server.secrets]
    endpoints: list[ChatEndpoint] = []
    if kind == "teacher_replay" and config.replay.on:
        endpoints += config.replay.teachers
    if kind == "judge":
        endpoints += config.judges.models
    writer = config.sdpo.hints.active_writer if config.asks_for_hints else None
    if kind == "hint_writer" and writer is not None:
        endpoints.append(writer)
    return [one.key_variable for one in endpoints if one.key_variable is not None]


def _check(endpoint: ChatEndpoint, who: str, environ: Mapping[str, str]) -> None:
    variable, file = endpoint.key_variable, endpoint.api_key_file
    if variable is not None and not environ.get(variable):
        raise MissingKey(
            f"{who} takes its key from the environment variable {variable}, which is not set: "
            "export it, name another with api_key_env, or remove api_key_env if no key is needed"
        )
    if file is not None and not file.is_file():
        raise MissingKey(
            f"{who} takes its key from the file {file}, which is not there: write the key into it, "
            "or name another file with api_key_file"
        )
