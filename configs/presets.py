"""Presets: the configs that the package ships, each known by the name of its file.

The first line of a preset says what it trains, and the hardware that it needs.
"""

from pathlib import Path

from composer_mesh.configs import plugins
from composer_mesh.configs.errors import nearest

FOLDER = Path(__file__).parent
SUFFIX = ".toml"


def names() -> list[str]:
    """Return the names of all presets."""
    return sorted(one.stem for one in FOLDER.glob(f"*{SUFFIX}"))


def about(name: str) -> str:
    """Return the first line of a preset, without its comment mark."""
    return text_of(name).partition("\n")[0].removeprefix("# ")


def text_of(name: str) -> str:
    """Return the TOML of a preset."""
    return file_of(name).read_text(encoding="utf-8")


def file_of(name: str) -> Path:
    """Return the path of a preset."""
    return FOLDER / f"{name}{SUFFIX}"


def resolve(path: Path) -> Path:
    """Return the preset that `path` names; `path` itself if it names none, or a file."""
    name = str(path)
    return file_of(name) if name in names() and not path.is_file() else path


def is_config(word: str) -> bool:
    """Return whether a word that may be a task instead is a TOML file or a preset."""
    return word.endswith(SUFFIX) or (word in names() and plugins.find("tasks", word) is None)


def repair(path: Path | str) -> str:
    """Return what to write in place of a config that does not exist."""
    name = Path(path).name.removesuffix(SUFFIX)
    if near := nearest(name, names()):
        preset = f"for the preset write {near[0]}, as in `composer-mesh train {near[0]}`"
    else:
        preset = "or name a preset, as in `composer-mesh train quickstart`"
    return f"correct the path, {preset}; `composer-mesh presets` lists all"
