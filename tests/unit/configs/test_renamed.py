"""A former config key is read with a warning that names the present one."""

from __future__ import annotations

from typing import Any

import pytest

from composer_mesh.configs import renamed
from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.load import resolve_config

SAYS = r"trainer\.rate is now trainer\.lr: rename it"


@pytest.fixture(autouse=True)
def _former_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(renamed.KEYS, "trainer.rate", "trainer.lr")


def table(**trainer: Any) -> dict[str, Any]:
    return {"run": {"name": "r", "steps": 1}, "data": {"task": "toolbox"}, "trainer": trainer}


def test_a_former_key_of_a_file_is_read_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match=SAYS):
        assert resolve_config(table(rate=0.25), [], "file").trainer.lr == 0.25


def test_a_former_key_of_an_override_is_read_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match=SAYS):
        assert resolve_config(table(), ["trainer.rate=0.5"], "file").trainer.lr == 0.5


def test_both_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.rate"):
        resolve_config(table(rate=0.5, lr=0.5), [], "file")


def test_a_table_without_the_key_is_read_as_it_is() -> None:
    config = resolve_config(table(lr=0.5), ["run.steps=2"], "file")
    assert (config.trainer.lr, config.run.steps) == (0.5, 2)
