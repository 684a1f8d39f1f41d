"""The command that lists the presets, and copies one to change it."""

import argparse
from pathlib import Path

from composer_mesh.configs import presets as shipped
from composer_mesh.configs.errors import did_you_mean, nearest
from composer_mesh.services.checks.accepting import UsageError
from composer_mesh.services.commands.parser import argument, command, output


@command(
    "list the presets, or copy one",
    argument("--copy", metavar="NAME", help="write this preset to a file, to edit it"),
    output("new file for --copy (default: NAME.toml)", metavar="FILE"),
    group="configs",
    example="presets --copy quickstart",
)
def presets(arguments: argparse.Namespace) -> int:
    """Print the name and first line of each preset, or write one to a new file."""
    if arguments.copy is not None:
        return _copy(arguments.copy, arguments.output)
    if arguments.output is not None:
        raise UsageError(f"--output {arguments.output} needs --copy NAME: add it")
    names = shipped.names()
    width = max(map(len, names))
    for name in names:
        print(f"{name:{width}}  {shipped.about(name)}")
    return 0


def _copy(name: str, place: Path | None) -> int:
    if name not in shipped.names():
        near = nearest(name, shipped.names())
        repair = did_you_mean(near) if near else "composer-mesh presets lists all"
        raise UsageError(f"--copy {name[:80]!r} is not a preset: {repair}")
    file = place or Path(shipped.file_of(name).name)
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(shipped.text_of(name))
    except FileExistsError:
        raise UsageError(f"{file} exists: name a new file with --output") from None
    print(f"wrote {file}: composer-mesh train {file}")
    return 0
