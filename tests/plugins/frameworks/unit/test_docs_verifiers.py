"""What docs/verifiers.md says is what is there."""

import inspect
import tomllib
from pathlib import Path

from guides import Guide

from composer_mesh.configs.load import read_table
from composer_mesh.configs.schema import Config
from composer_mesh.plugins.frameworks.verifiers.driver_process import INFRASTRUCTURE
from composer_mesh.plugins.frameworks.verifiers.workflow import VerifiersEnvironment

PAGE = Guide.read("verifiers.md")
RUN = Path(__file__).parents[1] / "verifiers" / "run.toml"
MOST_TOKENS = 4000


def test_its_config_is_one_and_names_options_that_exist() -> None:
    (text,) = PAGE.blocks("toml")
    table = tomllib.loads(text)
    config = Config.model_validate({"run": {"name": "page", "steps": 1}, **table})
    inspect.signature(VerifiersEnvironment).bind(**config.rollouts.options)
    assert config.rollouts.options["env"]["agent"]["max_total_tokens"] < MOST_TOKENS


def test_every_option_is_on_the_page_and_in_the_run_that_it_names() -> None:
    options = inspect.signature(VerifiersEnvironment).parameters
    assert {*options} - {"python"} <= set(PAGE.inline())
    assert "rollouts.options.python" in PAGE.inline()
    inspect.signature(VerifiersEnvironment).bind(**read_table(RUN)["rollouts"]["options"])


def test_every_class_of_infrastructure_is_on_the_page() -> None:
    assert set(PAGE.inline()) >= INFRASTRUCTURE
