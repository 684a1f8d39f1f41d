"""Where BFCL's rows, documents and classes come from: the package bfcl-eval.

Rows are data. A class is taken by its name from the list below, and nothing else of the package is
imported, least of all its executor, which evaluates text.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from composer_mesh.configs.regular_files import read_regular
from composer_mesh.plugins.task_packages.requirement import Requirement
from composer_mesh.tasks.errors import UnusableTask

BFCL = Requirement(
    "bfcl",
    "bfcl_eval",
    "bfcl_eval",
    ("2026.3.23",),
    "pip install 'composer-mesh[bfcl]' && pip install --no-deps bfcl-eval==2026.3.23",
)
CODE = "eval_checker.multi_turn_eval.func_source_code"
FILES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
"""Modules of the classes, which are those of their documents too."""

CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
LONGEST = 1 << 26


class Source(Protocol):
    """Rows by category, the documents of a class's functions, and the class itself."""

    def rows(self, category: str) -> list[dict[str, Any]]: ...

    def gold(self, category: str) -> dict[str, list[list[str]]]: ...

    def documents(self, api: str) -> list[dict[str, Any]]: ...

    def api(self, name: str) -> type[Any]: ...


class PackageSource:
    """The source that bfcl-eval is."""

    def rows(self, category: str) -> list[dict[str, Any]]:
        """Return the conversations of a category."""
        return self.single_turns(f"multi_turn_{category}")

    def gold(self, category: str) -> dict[str, list[list[str]]]:
        """Return the gold calls of each turn, as text, by the row's id."""
        return self.answers(f"multi_turn_{category}")

    def single_turns(self, category: str) -> list[dict[str, Any]]:
        """Return the rows of a category of single turns."""
        return _lines(self._data / f"BFCL_v4_{category}.json")

    def answers(self, category: str) -> dict[str, list[Any]]:
        """Return the right calls, each with its possible values, by the row's id."""
        lines = _lines(self._data / "possible_answer" / f"BFCL_v4_{category}.json")
        return {line["id"]: line["ground_truth"] for line in lines}

    def documents(self, api: str) -> list[dict[str, Any]]:
        """Return the documents of a class's functions."""
        return _lines(self._data / "multi_turn_func_doc" / f"{_file(api)}.json")

    def api(self, name: str) -> type[Any]:
        """Return a class by its name in a row."""
        found: type[Any] = getattr(BFCL.imported(f"{CODE}.{_file(name)}"), name)
        return found

    @cached_property
    def _data(self) -> Path:
        return Path(str(BFCL.imported().__file__)).parent / "data"


def _file(api: str) -> str:
    if api not in FILES:
        raise UnusableTask(
            f"a row of bfcl names the class {api[:40]!r}, which is none of {', '.join(FILES)}: "
            "install the version of bfcl-eval that docs/task-packages.md names"
        )
    return FILES[api]


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = read_regular(path, LONGEST).decode()
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UnusableTask(f"{path} cannot be read ({error}): {BFCL.install}") from error
