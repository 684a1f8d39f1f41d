"""docs/openenv.md says what is: its settings load, its options and bounds are those of the code."""

import re

import pytest
from guides import Guide, as_a_run
from openenv_server import OpenEnvServer

from composer_mesh.plugins.openenv.client import connection, options, schemas, task, wire
from composer_mesh.plugins.openenv.client.task import OpenEnvTask
from composer_mesh.tasks.loading import make_task

PAGE = Guide.read("openenv.md")


def test_the_settings_make_the_task() -> None:
    with OpenEnvServer() as server:
        text = PAGE.blocks("toml")[0].replace("http://127.0.0.1:8000", server.url)
        made = make_task(as_a_run(text))
    assert isinstance(made, OpenEnvTask)
    assert made.name == "openenv"


def test_the_table_of_options_is_whole() -> None:
    table = PAGE.text.partition("| `data.options` | meaning |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(options.OpenEnvOptions.model_fields)


@pytest.mark.parametrize(
    "said",
    [
        f'`name` | name of the task in traces and metrics; `"{OpenEnvTask.name}"`',
        f"{schemas.MOST_TOOLS} tools, {schemas.MOST_NODES:,} schemas",
        f"descriptions of {schemas.LONGEST_TEXT:,}\ncharacters",
        f"after {connection.FIRST_WAIT_S:g} to {connection.LONGEST_WAIT_S:g} s",
        f"`reset_s` is {task.RESET_SHARE:g} and `step_s` {task.STEP_SHARE:g} of it",
        f"what `reset_s` leaves of {task.MOST_SHARE:g}",
        f"`metadata.{wire.TURN}`",
        *(f"| `{key}` |" for key in (wire.ERROR_KIND, wire.HINT_TEMPLATE_KEY, wire.ERROR_FACTS)),
    ],
)
def test_the_bounds_and_names_are_those_of_the_code(said: str) -> None:
    assert said in PAGE.text
