"""The pages on channels and ablations say what is: settings parse, names exist."""

from __future__ import annotations

import re

import pytest
from guides import Guide, as_a_run, names_in_code

from composer_mesh.channels.port import make_channel
from composer_mesh.configs.channels import UpdateShare
from composer_mesh.configs.sdpo import SitesConfig
from composer_mesh.services.commands.parser import make_parser

PAGES = {
    name: Guide.read(name)
    for name in (
        *("channels.md", "ablation.md", "ablate.md"),
        "decisions/0025-a-backward-for-each-channel.md",
    )
}
METRICS = {
    f"{kind}_{channel}"
    for kind in ("norm", "share", "scale")
    for channel in ("policy", "sdpo", "replay", "echo")
}
"""Names of metrics that are made of their parts."""
CHANNELS, ABLATE = PAGES["channels.md"], PAGES["ablate.md"]


def test_the_example_is_a_run_with_every_setting_of_the_page() -> None:
    block, echo = CHANNELS.blocks("toml")
    config = as_a_run(f"{block}\n{echo}")
    assert make_channel("echo", config.channels["echo"]).name == "echo"
    assert config.sdpo.max_update_share == 0.4
    assert config.sdpo.alpha_schedule.by == "success"
    for name in (*SitesConfig.model_fields, *UpdateShare.model_fields):
        assert re.search(rf"\b{name}\b", CHANNELS.text), name


@pytest.mark.parametrize("page", PAGES)
def test_every_name_on_the_page_exists(page: str) -> None:
    assert PAGES[page].names() - names_in_code() - METRICS == set()


def test_the_page_on_ablations_names_every_option_of_the_command() -> None:
    options = vars(make_parser().parse_args(["ablate", "a.toml"]))
    shown = ABLATE.text[ABLATE.text.index("composer-mesh ablate CONFIG...") :]
    for option in options.keys() - {"command", "config"}:
        assert f"--{option.replace('_', '-')}" in shown, option
