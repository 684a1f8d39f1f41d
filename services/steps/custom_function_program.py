"""The program of `CustomFunctionProcess`: imports a custom function, answers requests about it.

    {"import_path", "kwargs", "needs"}  -> {}, or {"refused": [the error's arguments], "traceback"}
    {"groups", "ids"}                   -> {"advantages"}, or the same refusal
    {"example"}                         -> {} for a loss that can be trained, or the same refusal

One line each. The first request names the function, which is imported then; only a loss has needs.
"""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from composer_mesh.losses.custom import (
    CustomFunctionError,
    check_needs,
    check_signature,
    custom_advantages,
    load_function,
    try_loss,
)
from composer_mesh.losses.custom_function import Function
from composer_mesh.mesh.environment import use_import_paths


class ImportedFunction:
    """A custom function, and the answers to requests about it."""

    def __init__(self) -> None:
        self._function: Function | None = None
        self._path, self._kwargs = "", dict[str, Any]()

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Import the function that the request names, or call it as the request says."""
        try:
            if self._function is None:
                return self._load(**request)
            if "example" in request:
                try_loss(self._function, self._path, self._kwargs, **request["example"])
                return {}
            found = custom_advantages(
                self._function, self._path, self._kwargs, request["groups"], ids=request["ids"]
            )
        except CustomFunctionError as error:
            return {"refused": error.args, "traceback": traceback.format_exc()}
        return {"advantages": [advantages.tolist() for advantages in found]}

    def _load(
        self, import_path: str, kwargs: dict[str, Any], needs: Sequence[str] | None = None
    ) -> dict[str, Any]:
        function = load_function(import_path)
        check_signature(function, import_path, kwargs)
        if needs is not None:
            check_needs(function, import_path, needs)
        self._function, self._path, self._kwargs = function, import_path, kwargs
        return {}


def main(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until there are no more."""
    function = ImportedFunction()
    for line in requests:
        answers.write(json.dumps(function.answer(json.loads(line))).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    use_import_paths()
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the function prints is no answer
    if isinstance(sys.stdout, io.TextIOWrapper):  # and is seen as it is printed
        sys.stdout.reconfigure(line_buffering=True)
    main(sys.stdin.buffer, out)
