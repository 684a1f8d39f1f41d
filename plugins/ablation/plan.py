"""Plan of an ablation: one config with and without its channels, over seeds, run sequentially.

Finished runs are kept, half ones resumed and the others trained. Runs of one process
share Monarch, so they never run concurrently.

The settings of an ablation are configs, and values that some of their keys take in turn.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from composer_mesh.configs.changes import Change
from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.services.directory.claim import (
    RunDirectoryError,
    claimed,
    set_aside,
)
from composer_mesh.services.directory.report import EVALUATIONS_FILE, read_evaluations
from composer_mesh.services.directory.resume import as_recorded, may_be_resumed, refuse_unfit
from composer_mesh.services.directory.sft_start import started

BASELINE = "neither"
CHANNELS_OF = {
    BASELINE: (),
    "sdpo": ("sdpo.alpha",),
    "replay": ("replay.beta",),
    "both": ("sdpo.alpha", "replay.beta"),
}
"""The weights that each arm keeps; it sets the others to 0."""

EVALUATIONS_OF_A_RUN = 10
SIGNALLED = 128
TARGET = 0.8
"""Success whose steps are counted, unless another is given."""

Train = Callable[[Config, Path, Sequence[Change] | None], int]
"""Trains one run into a directory and returns the train command's exit status.

The changes are those with which a half run is resumed; None for a new run.
"""


@dataclass(frozen=True)
class PlannedRun:
    """One run of an ablation."""

    arm: str
    seed: int
    config: Config
    setting: str = ""

    @property
    def place(self) -> Path:
        """Directory of the run, relative to that of the ablation."""
        return Path(self.setting) / self.arm / f"seed-{self.seed}"

    def __str__(self) -> str:
        before = f"{self.setting}, " if self.setting else ""
        return f"{before}{self.arm}, seed {self.seed}"


@dataclass(frozen=True)
class Ablation:
    """The planned comparison of one setting; `base` is the config before the changes of an arm.

    `setting` names it among several; `values` are those of the varied keys.
    """

    file: Path
    overrides: tuple[str, ...]
    base: Config
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    runs: tuple[PlannedRun, ...]
    setting: str = ""
    values: tuple[tuple[str, str], ...] = ()
    target: float = TARGET

    @property
    def eval_every(self) -> int:
        """Steps between two held-out evaluations of a run."""
        return self.runs[0].config.eval.every


def plan_ablation(
    file: Path,
    overrides: Sequence[str] = (),
    arms: Sequence[str] = tuple(CHANNELS_OF),
    seeds: Sequence[int] = (0, 1, 2),
    eval_every: int | None = None,
    *,
    setting: str = "",
    values: Sequence[tuple[str, str]] = (),
    target: float = TARGET,
) -> Ablation:
    """Plan the runs of a setting, all arms of a seed before the next; raise `ConfigError`.

    An interrupted ablation therefore has complete seeds to compare.
    """
    _check_choices(overrides, arms, seeds, eval_every, target)
    overrides = [*overrides, *(f"{key}={value}" for key, value in values)]
    base = started(load_config(file, overrides))
    _check_arms(arms, base)
    every = eval_every or base.eval.every or max(1, base.run.steps // EVALUATIONS_OF_A_RUN)
    runs = []
    for seed in seeds:
        for arm in arms:
            changes = list(_changes(base, arm, seed, every, setting))
            config = load_config(file, [*overrides, *changes])
            config = config.model_copy(update={"policy": base.policy})
            runs.append(PlannedRun(arm, seed, config, setting))
    return Ablation(
        file,
        tuple(overrides),
        base,
        tuple(arms),
        tuple(seeds),
        tuple(runs),
        setting,
        tuple(values),
        target,
    )


def _changes(base: Config, arm: str, seed: int, every: int, setting: str) -> Iterator[str]:
    between = f"-{setting}" if setting else ""
    yield f"run.name={base.run.name}{between}-{arm}-seed-{seed}"
    yield f"run.seed={seed}"
    yield f"eval.every={every}"
    kept = arms_of(base)[arm]
    yield from (f"{key}=0" for key in _weights(base) if key not in kept)


def arms_of(base: Config) -> dict[str, tuple[str, ...]]:
    """Return the weights that each arm keeps.

    A channel that is not ours is an arm of its name; with one there is also the arm "all".
    """
    own = {name: (f"channels.{name}.weight",) for name in base.channels}
    return CHANNELS_OF | own | ({"all": tuple(_weights(base))} if own else {})


def _weights(base: Config) -> dict[str, float]:
    """Return the weight of each channel by its key."""
    own = {f"channels.{name}.weight": one.weight for name, one in base.channels.items()}
    return {"sdpo.alpha": base.sdpo.alpha, "replay.beta": base.replay.beta, **own}


def _check_choices(
    overrides: Sequence[str],
    arms: Sequence[str],
    seeds: Sequence[int],
    eval_every: int | None,
    target: float,
) -> None:
    if not 0 < target <= 1:
        raise ConfigError(
            f"--target is {target} but must be a share of success above 0: write for example 0.8"
        )
    for option, values in (("--arms", arms), ("--seeds", seeds)):
        if not values or len(set(values)) < len(values):
            raise ConfigError(
                f"{option} is {','.join(map(str, values))!r} but needs one value or more, each "
                "once: correct the list"
            )
    if eval_every is not None and eval_every < 1:
        raise ConfigError(
            f"--eval-every is {eval_every} but must be 1 step or more: raise it, or leave it out"
        )
    if any(text.partition("=")[0].strip() == "run.seed" for text in overrides):
        raise ConfigError("--set run.seed has no effect here: name the seeds with --seeds")


def _check_arms(arms: Sequence[str], base: Config) -> None:
    known, weights = arms_of(base), _weights(base)
    for arm in arms:
        if arm not in known:
            raise ConfigError(
                f"--arms names {arm!r} but an arm is one of {', '.join(known)}: correct the name"
            )
        for key in known[arm]:
            if not weights[key]:
                raise ConfigError(
                    f"{key} is 0 but arm {arm!r} needs the channel: set {key} above 0, or leave "
                    "the arm out with --arms"
                )


def run_ablation(
    runs: Sequence[PlannedRun],
    output: Path,
    train: Train,
    tell: Callable[[str], None],
    publish: Callable[[], object],
    merged: Container[Path] = (),
) -> int:
    """Train every unfinished run; return 0, or the status of the signal that ended it.

    A failed run does not stop the others. `publish` is called after each run. Runs whose places are
    in `merged` have finished elsewhere.
    """
    for number, run in enumerate(runs, 1):
        place, title = output / run.place, f"run {number} of {len(runs)}: {run}"
        if is_finished(place, run.config.run.steps):
            tell(f"{title}: kept, it finished earlier")
            continue
        if run.place in merged:
            tell(f"{title}: taken from a report")
            continue
        changes, about = _half(run, place)
        for line in about:
            tell(f"{title}: {line}")
        tell(title)
        with claimed(place):
            code = train(run.config, place, changes)
        publish()
        if code > SIGNALLED:
            tell(f"stopped at {title}: the same command continues from here")
            return code
    return 0


def _half(run: PlannedRun, place: Path) -> tuple[Sequence[Change] | None, list[str]]:
    """Return with which changes a half run is resumed, None to begin anew; and what to tell of it.

    A run that cannot be resumed is moved aside.
    """
    notes = []
    if may_be_resumed(place):
        try:
            return refuse_unfit(place, run.config), ["resumed where it was stopped"]
        except RunDirectoryError as error:
            notes.append(f"begins anew: {error}")
    if aside := set_aside(place):
        notes.append(f"moved an unfinished one to {aside}")
    return None, notes


def is_finished(place: Path, steps: int) -> bool:
    """Return whether a run finished: its last evaluation is after its last step."""
    evaluations = read_evaluations(place / EVALUATIONS_FILE)
    return bool(evaluations) and evaluations[-1].step == steps


def refuse_other_runs(runs: Sequence[PlannedRun], output: Path) -> None:
    """Raise RunDirectoryError if a planned run's directory holds a run with another config."""
    for run in runs:
        place = output / run.place
        if (place / "config.toml").exists() and (changed := _differences(run.config, place)):
            raise RunDirectoryError(
                f"{place} holds a run of another config than the requested one ({changed}): "
                "request the same, or name another directory with --output"
            )


def _differences(wanted: Config, place: Path) -> str:
    """Return the sections that differ; an unreadable config differs completely."""
    try:
        found = load_config(place / "config.toml")
        wanted = as_recorded(wanted, found)
    except ConfigError:
        return "not a config of this version"
    return ", ".join(
        section
        for section in Config.model_fields
        if getattr(found, section) != getattr(wanted, section)
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
    def parse(cls, text: str, option: str = "--vary") -> Varied:
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
    parts = [
        file.name.removesuffix(".toml"),
        *(f"{key.rpartition('.')[2]}-{value}" for key, value in values),
    ]
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
