"""The guide to several machines names commands, keys and events that there are."""

import re

from pydantic import BaseModel
from repository import ROOT

from composer_mesh.configs.cluster import (
    ClusterConfig,
    KubernetesConfig,
    SlurmConfig,
    SshConfig,
)

TEXT = (ROOT / "docs" / "cluster.md").read_text()
SECTIONS: dict[str, type[BaseModel]] = {
    "cluster": ClusterConfig,
    "cluster.slurm": SlurmConfig,
    "cluster.kubernetes": KubernetesConfig,
    "cluster.ssh": SshConfig,
}


def test_every_key_of_a_section_that_the_page_shows_is_one() -> None:
    shown = 0
    for section, body in re.findall(
        r"^ *\[(cluster[a-z.]*)\]\n((?: *\w+ = .*\n)*)", TEXT, re.MULTILINE
    ):
        for key in re.findall(r"^ *(\w+) = ", body, re.MULTILINE):
            assert key in SECTIONS[section].model_fields, (section, key)
            shown += 1
    assert shown > 10
    for section, key in re.findall(r"`(cluster(?:\.ssh|\.slurm|\.kubernetes)?)\.(\w+)`", TEXT):
        names = {name.rpartition(".")[2] for name in SECTIONS}
        assert key in SECTIONS[section].model_fields or key in names, (section, key)


def test_what_the_page_says_about_a_lease_is_the_default() -> None:
    assert ClusterConfig().lease_s == 15.0
    assert "1.4 x `lease_s`, 21 s | after `lease_s`, 15 s" in TEXT
