"""Base class of all config sections: frozen, strict, no unknown keys; and types of their fields.

Every number has a lower and an upper bound, every text and list a longest length, so that no value
overflows or exhausts what computes with it.

A function of the user's, named in a config by its import path.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

LARGEST = 1e12
MOST = 1_000_000_000
MOST_TOKENS = 100_000_000
MOST_PROCESSES = 1000
MOST_HOSTS = 1000
MOST_CORES = 4096
MOST_GB = 1_000_000
MOST_ENTRIES = 1000
LONGEST_TEXT = 10_000
DEEPEST = 8
YEAR_S = 31_536_000
LARGEST_INTEGER = 2**63 - 1

COLDEST, HOTTEST = 1e-4, 100.0
"""Bounds of a temperature above 0: float32 carries logits up to 3e34 divided by the lower one."""
LEAST_SHARE = 1e-6
"""Smallest share of the probabilities that float32 distinguishes from none."""


def _warm_enough(temperature: float) -> float:
    """Return a temperature; raise ValueError for one that overflows logits of float32."""
    if 0 < temperature < COLDEST:
        raise ValueError(
            f"{temperature} is above 0 and below {COLDEST}: use 0, which is greedy, or raise it"
        )
    return temperature


Share = Annotated[float, Field(ge=0, le=1)]
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Positive = Annotated[float, Field(gt=0, le=LARGEST)]
NotNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Temperature = Annotated[float, Field(ge=0, le=HOTTEST), AfterValidator(_warm_enough)]
"""Temperature of sampling; 0 is greedy."""
TemperatureAboveZero = Annotated[float, Field(ge=COLDEST, le=HOTTEST)]
TopP = Annotated[float, Field(ge=LEAST_SHARE, le=1)]
"""Sum of the probabilities of the tokens that may be sampled."""
Seconds = Annotated[float, Field(gt=0, le=YEAR_S)]
Dollars = Annotated[float, Field(ge=0, le=1_000_000)]
DollarsAboveZero = Annotated[float, Field(gt=0, le=1_000_000)]
Gigabytes = Annotated[float, Field(gt=0, le=MOST_GB)]
Count = Annotated[int, Field(ge=1, le=MOST)]
CountOrZero = Annotated[int, Field(ge=0, le=MOST)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Concurrent = Annotated[int, Field(ge=1, le=100_000)]
ImportPath = Annotated[str, Field(min_length=1)]
Processes = Annotated[int, Field(ge=1, le=MOST_PROCESSES)]
Cores = Annotated[int, Field(ge=1, le=MOST_CORES)]


def usable_path(path: Path) -> Path:
    """Return the path; raise ValueError if no file system can have it."""
    if "\0" in str(path):
        raise ValueError("a path cannot contain a zero byte: remove it")
    longest = max((len(part.encode()) for part in path.parts), default=0)
    if len(str(path).encode()) >= 4096 or longest > 255:
        raise ValueError(
            f"the path has {len(str(path))} characters and a name of {longest} bytes, but a path "
            "has at most 4095 and a name in it 255: shorten it"
        )
    return path


def _plain_table(table: dict[str, Any]) -> dict[str, Any]:
    """Return a free-form table; raise ValueError for what no other format could store."""
    for depth, key, value in _values(table, 1):
        if depth > DEEPEST:
            raise ValueError(f"{key[:40]!r} is more than {DEEPEST} tables deep: flatten the table")
        if not isinstance(value, bool | int | float | str | list | dict):
            raise ValueError(f"{key[:40]!r} is a {type(value).__name__}: write it as text")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key[:40]!r} is {value} but must be finite: write a number")
        if type(value) is int and abs(value) > LARGEST_INTEGER:
            raise ValueError(f"{key[:40]!r} is above {LARGEST_INTEGER}: write a smaller number")
    return table


def _values(value: Any, depth: int, key: str = "") -> Iterator[tuple[int, str, Any]]:
    """Yield depth, key and value of all that a table contains, no deeper than allowed."""
    if isinstance(value, dict | list) and depth <= DEEPEST:
        for name, one in value.items() if isinstance(value, dict) else ((key, v) for v in value):
            yield depth, name, one
            yield from _values(one, depth + 1, name)
    elif isinstance(value, dict | list):
        yield depth, key, value


# TOML has no path type, so strings are converted to paths; strict mode converts nothing else.
FilePath = Annotated[Path, Field(strict=False), AfterValidator(usable_path)]
FreeTable = Annotated[dict[str, Any], Field(max_length=MOST_ENTRIES), AfterValidator(_plain_table)]


class Section(BaseModel):
    """A table of a config. Strings are not converted to numbers, nor booleans to counts.

    `_problems` says which of its values do not fit each other; the first problem refuses the table.
    Validators are built at the first use: actors get their config as it is and need none.
    """

    model_config = ConfigDict(
        frozen=True,
        defer_build=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        str_max_length=LONGEST_TEXT,
    )

    def _problems(self) -> Iterator[str]:
        """Yield what does not fit together, each with its repair."""
        yield from ()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for problem in self._problems():
            raise ValueError(problem)
        return self


def repeated(names: Iterable[str]) -> list[str]:
    """Return the names that are there more than once."""
    return [name for name, count in Counter(names).items() if count > 1]


def by_type(default: str) -> Callable[[Any], str | None]:
    """Return a discriminator that reads a table's `type`; `default` if it has none."""

    def tag(table: Any) -> str | None:
        if isinstance(table, Section):
            return str(getattr(table, "type", default))
        found = table.get("type", default) if isinstance(table, dict) else None
        return found if isinstance(found, str) else None

    return tag


class CustomFunction(Section):
    """A user-defined function or class and its keyword arguments."""

    import_path: ImportPath
    """Import path, as my_module.my_function or my_file.py:my_function. A module is searched in
    run.import_paths too."""

    kwargs: FreeTable = Field(default_factory=dict)
    """Its keyword arguments."""
