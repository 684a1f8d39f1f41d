"""Checks that the API keys that a config refers to are present, before anything is started.

Does not check that a provider accepts them; keys are neither stored nor shown.
"""

import os
from collections.abc import Mapping

from composer_mesh.configs.endpoint import ChatEndpoint
from composer_mesh.configs.schema import Config


class MissingKey(Exception):
    """An API key is missing where the config says; the message says the repair."""


def check_keys(config: Config, environ: Mapping[str, str] = os.environ) -> None:
    """Raise `MissingKey` for the first endpoint of the run without its key."""
    for teacher in config.replay.teachers if config.replay.on else ():
        _check(teacher, f"teacher {teacher.name!r}", environ)
    writer = config.sdpo.hints.asked if config.asks_for_hints else None
    if writer is not None:
        _check(writer, "the hint writer", environ)


def key_variables(config: Config, kind: str) -> list[str]:
    """Return the environment variables from which a kind of process reads its keys."""
    asked: list[ChatEndpoint] = []
    if kind == "teacher_replay" and config.replay.on:
        asked += config.replay.teachers
    writer = config.sdpo.hints.asked if config.asks_for_hints else None
    if kind == "hint_writer" and writer is not None:
        asked.append(writer)
    return [one.key_variable for one in asked if one.key_variable is not None]


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
