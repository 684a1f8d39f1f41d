"""The settings of an ablation: configs, and values that some of their keys take in turn."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from composer_mesh.configs.errors import ConfigError
from composer_mesh.plugins.ablation.plan import (
    CHANNELS_OF,
    TARGET,
    Ablation,
    PlannedRun,
    plan_ablation,
)

SET_BY_PLAN = {
    "run.seed": "--seeds",
    "run.name": "--output",
    "eval.every": "--eval-every",
}
"""Keys that an ablation sets itself, and the options that choose them."""


@dataclass(frozen=True)
class Varied:
    """A key of the config and the values, as written after --set, that it takes in turn."""

    key: str
    values: tuple[str, ...]
    option: str = "--vary"

    @classmethod
    def parse(cls, text: str, option: str = "--vary") -> "Varied":
        """Parse KEY=A,B; raise `ConfigError`."""
        key, equals, values = text.partition("=")
        found = tuple(value.strip() for value in values.split(","))
        if not equals or not key.strip() or not all(found):
            raise ConfigError(
                f"{option} is {text!r} but must be a key and its values: write for example "
                f"{option} trainer.lr=1e-4,3e-4"
            )
        return cls(key.strip(), found, option)


@dataclass(frozen=True)
class Study:
    """The settings of an ablation, a single one in most; `difficulty` is the key of the curve."""

    settings: tuple[Ablation, ...]
    difficulty: str | None = None

    @property
    def runs(self) -> list[PlannedRun]:
        """The runs in order: all settings and arms of a seed before the next seed.

        An interrupted ablation therefore has complete seeds to compare.
        """
        seeds = self.settings[0].seeds
        every = [run for setting in self.settings for run in setting.runs]
        return sorted(every, key=lambda run: seeds.index(run.seed))

    @property
    def single(self) -> bool:
        """Whether there is one setting, whose runs are in no directory of their own."""
        return len(self.settings) == 1 and not self.settings[0].setting


def plan_study(
    files: Sequence[Path],
    overrides: Sequence[str] = (),
    arms: Sequence[str] = tuple(CHANNELS_OF),
    seeds: Sequence[int] = (0, 1, 2),
    eval_every: int | None = None,
    varied: Sequence[Varied] = (),
    difficulty: Varied | None = None,
    target: float = TARGET,
) -> Study:
    """Plan the settings: each config with each combination of the varied values.

    Raises `ConfigError` before anything starts.
    """
    every = [*varied, *([] if difficulty is None else [difficulty])]
    _check(files, every, overrides)
    named = len(files) > 1 or bool(every)
    settings = tuple(
        plan_ablation(
            file,
            overrides,
            arms,
            seeds,
            eval_every,
            setting=_name(file, values) if named else "",
            values=values,
            target=target,
        )
        for file in files
        for values in _combinations(every)
    )
    names = Counter(one.setting for one in settings)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ConfigError(
            f"two settings have the directory {twice[0]!r}: rename a config, or give values that "
            "differ in letters, digits, '.', '_' or '-'"
        )
    return Study(settings, None if difficulty is None else difficulty.key)


def _combinations(varied: Sequence[Varied]) -> Iterator[tuple[tuple[str, str], ...]]:
    keys = [one.key for one in varied]
    for values in product(*(one.values for one in varied)):
        yield tuple(zip(keys, values, strict=True))


def _name(file: Path, values: Sequence[tuple[str, str]]) -> str:
    """Return the name of a setting, which is that of its directory."""
    parts = [file.stem, *(f"{key.rpartition('.')[2]}-{value}" for key, value in values)]
    return re.sub(r"[^A-Za-z0-9._-]", "_", "-".join(parts))


def _check(files: Sequence[Path], varied: Sequence[Varied], overrides: Sequence[str]) -> None:
    if not files or len(set(files)) < len(files):
        raise ConfigError(
            f"the configs are {', '.join(map(str, files)) or 'none'}, but one or more are needed, "
            "each once: correct the list"
        )
    fixed = [text.partition("=")[0].strip() for text in overrides]
    keys = [one.key for one in varied]
    for one in varied:
        if one.key in SET_BY_PLAN:
            raise ConfigError(
                f"{one.option} {one.key} has no effect here: use {SET_BY_PLAN[one.key]}"
            )
        if one.key in fixed or keys.count(one.key) > 1:
            raise ConfigError(
                f"{one.option} varies {one.key}, which is given twice: name it once, in one of "
                "--set, --vary and --difficulty"
            )
        if len(set(one.values)) < len(one.values):
            raise ConfigError(
                f"{one.option} {one.key} is {','.join(one.values)!r} but needs each value once: "
                "correct the list"
            )
        if one.option == "--difficulty" and not all(map(_is_number, one.values)):
            raise ConfigError(
                f"--difficulty {one.key} is {','.join(one.values)!r} but must be numbers, the axis "
                "of its curve: use --vary for other values"
            )


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text) is not None
