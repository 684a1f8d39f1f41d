"""Errors whose text is a template cross a mesh: type, arguments and text arrive."""

import importlib
import pickle

import pytest
from repository import ROOT

from composer_mesh.configs.worded import Worded

CORE = ("actors", "planning")
MODULES = [
    ".".join(("composer_mesh", *path.relative_to(ROOT).with_suffix("").parts))
    for folder in CORE
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "(Worded" in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_each_error_of_a_module_crosses_a_process(name: str) -> None:
    found = vars(importlib.import_module(name)).values()
    kinds = [one for one in found if isinstance(one, type) and issubclass(one, Worded)]
    for kind in kinds:
        if kind is not Worded:
            error = kind(*range(9))
            copy = pickle.loads(pickle.dumps(error))
            assert (type(copy), copy.args, str(copy)) == (kind, error.args, str(error))
