"""Renamed commands and options: refused with the new name instead of being run."""

from collections.abc import Sequence

from composer_mesh.services.checks.accepting import UsageError

COMMANDS = {"check-run": "verify"}
OPTIONS = {"--resume-or-begin": "--auto-resume", "--replay-traces": "--from-traces"}


def refuse_retired(words: Sequence[str]) -> None:
    """Raise UsageError if a command line (without the program name) uses a retired name."""
    if words and words[0] in COMMANDS:
        raise UsageError(_message("command", words[0], COMMANDS[words[0]]))
    for word in words:
        option = word.partition("=")[0]
        if option in OPTIONS:
            raise UsageError(_message("option", option, OPTIONS[option]))


def _message(kind: str, old: str, new: str) -> str:
    return f"the {kind} {old} was renamed: write {new} instead"
