"""The guide to islands names commands, keys and tests that there are."""

import re
import shlex
import tomllib

from repository import ROOT

from composer_mesh.configs.islands import IslandsConfig
from composer_mesh.plugins.islands.rounds.outer_optimizer import payload_bytes
from composer_mesh.plugins.islands.store.blobs import PART_BYTES
from composer_mesh.services.commands.parser import make_parser

TEXT = (ROOT / "docs" / "islands.md").read_text()


def test_every_command_of_the_page_can_be_typed() -> None:
    lines = TEXT.replace("\\\n", " ")
    commands = re.findall(r"^    (composer-mesh [^\n]*)", lines, re.MULTILINE)
    assert len(commands) == 9
    for one in commands:
        make_parser().parse_args(shlex.split(one.partition("#")[0])[1:])


def test_the_section_of_the_page_is_accepted() -> None:
    body, by_lighthouse = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    islands = tomllib.loads(body)["islands"]
    assert IslandsConfig.model_validate(tomllib.loads(by_lighthouse)["islands"]).on

    found = IslandsConfig.model_validate(islands)

    defaults = IslandsConfig()
    for key in ("steps_per_round", "quorum", "deadline_s", "max_staleness", "outer"):
        assert getattr(found, key) == getattr(defaults, key)


def test_every_key_that_the_page_names_is_one() -> None:
    for key in ("quorum", "absent_after", "max_staleness", "rounds_kept", "request_s", "mixing"):
        assert key in IslandsConfig.model_fields
        assert f"`{key}`" in TEXT


def test_bytes_of_a_weight_are_as_the_page_says() -> None:
    sizes = [payload_bytes(1 << 20, how) / (1 << 20) for how in ("none", "int8", "int4")]
    assert "b bytes a weight (4, 1.02 or 0.52" in TEXT
    assert [round(size, 2) for size in sizes] == [4, 1.02, 0.52]
    ring = 16 * 3 / 4
    told = [(4 * size + 8 / 4) / ring for size in sizes]
    assert "1.5, 0.51 and 0.34 of one such step in H" in TEXT
    assert [round(one, 2) for one in told] == [1.5, 0.51, 0.34]
    assert PART_BYTES == 32 << 20
