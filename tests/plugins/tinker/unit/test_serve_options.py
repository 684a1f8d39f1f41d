"""What is refused before anything starts; docs/serve.md says what is."""

import ast
import os
import re
from pathlib import Path
from typing import Any

import pytest
from guides import Guide
from repository import ROOT

from composer_mesh.plugins.tinker import client
from composer_mesh.plugins.tinker.client_losses import CLIENT_LOSSES
from composer_mesh.plugins.tinker.server.options import (
    check_same_policy,
    check_serves,
    checked_keys,
)
from composer_mesh.services.cli import main
from composer_mesh.services.commands.parser import make_parser
from composer_mesh.services.web.options import ListenOptions, ServeRefused

KEY = "tml-0123456789abcdef"


@pytest.mark.parametrize(
    ("section", "values", "expected"),
    [
        ("trainer", {"ranks": 2, "expert_parallel": 2}, "trainer.expert_parallel is 2"),
        (
            "trainer",
            {"ranks": 2, "context_parallel": 2, "packing": True},
            "trainer.context_parallel is 2",
        ),
        ("trainer", {"ranks": 2, "compute_dtype": "bfloat16"}, "trainer.compute_dtype is"),
        ("trainer", {"ranks": 2, "packing": True}, "trainer.packing is True"),
        ("trainer", {"ranks": 2, "lora": {"rank": 4}}, "trainer.lora is "),
        ("trainer", {"sharding": "fsdp2"}, "trainer.sharding is 'fsdp2' but trainer.ranks is 1"),
        ("trainer", {"packing": True}, "trainer.packing is True"),
        (
            "generator",
            {"quantization": "fp8", "dtype": "bfloat16"},
            "generator.quantization is 'fp8'",
        ),
        ("trainer", {"optimizer": "muon"}, "trainer.optimizer is 'muon'"),
        ("trainer", {"optimizer_offload": True}, "trainer.optimizer_offload is True"),
        ("trainer", {"lora": {"rank": 4}}, "trainer.lora is "),
    ],
)
def test_configs_that_are_not_served_are_refused_by_key(
    build_config: Any, section: str, values: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ServeRefused) as refused:
        check_serves(build_config(**{section: values}))
    assert expected in str(refused.value)
    assert "set it to" in str(refused.value)


def test_all_weights_are_sharded_over_several_ranks(build_config: Any) -> None:
    serve = {"full_weights": True}
    for trainer in ({}, {"ranks": 2}):
        check_serves(build_config(trainer=trainer, serve=serve))
    with pytest.raises(ServeRefused, match=r"trainer.sharding is 'none'.* set it to 'auto'"):
        check_serves(build_config(trainer={"ranks": 2, "sharding": "none"}, serve=serve))


@pytest.mark.parametrize("sharding", ["auto", "none", "fsdp2"])
def test_several_ranks_are_served(build_config: Any, sharding: str) -> None:
    check_serves(build_config(trainer={"ranks": 2, "sharding": sharding}))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"full_weights": True}, "serve.full_weights is true: set it to 'embedded'"),
        ({"max_rank": 600}, "serve.max_rank is 600, but vLLM serves adapters up to rank 512"),
    ],
)
def test_what_vllm_cannot_serve_is_refused(
    build_config: Any, values: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ServeRefused) as refused:
        check_serves(build_config(generator={"engine": "vllm"}, serve=values))
    assert expected in str(refused.value)


def test_beyond_loopback_keys_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ListenOptions(host="10.1.2.3")
    with pytest.raises(ServeRefused, match="which other machines reach"):
        checked_keys(options, [])
    monkeypatch.setenv("ONE", KEY)
    monkeypatch.setenv("TWO", "abc-0123456789abcdef")
    monkeypatch.setenv("SHORT", "tml-1")
    for names, text in (
        (["TWO"], "begin with 'tml-'"),
        (["SHORT"], "holds 5"),
        (["ONE"] * 2, "another"),
    ):
        with pytest.raises(ServeRefused, match=text):
            checked_keys(options, names)
    assert checked_keys(options, ["ONE"]) == [KEY]
    assert "ONE" not in os.environ  # no process of the server inherits it
    assert checked_keys(ListenOptions(), []) == []


def test_a_folder_is_not_served_with_another_policy(build_config: Any, tmp_path: Path) -> None:
    check_same_policy(build_config(), tmp_path)
    check_same_policy(build_config(serve={"save_every": 3}), tmp_path)
    with pytest.raises(ServeRefused, match="models of another seed"):
        check_same_policy(build_config(run={"seed": 9}), tmp_path)
    with pytest.raises(ServeRefused, match=r"models of another number of trainer.ranks"):
        check_same_policy(build_config(trainer={"ranks": 2}), tmp_path)
    with pytest.raises(ServeRefused, match="models of another lora_alpha"):
        check_same_policy(build_config(serve={"lora_alpha": 8.0}), tmp_path)


def test_the_command_checks_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(Path(__file__).parents[4] / "configs" / "quickstart.toml")
    words = ["serve", config, "--output", str(tmp_path / "out"), "--check"]
    assert main(words) == 0
    assert "can be served" in capsys.readouterr().out
    assert main([*words, "--set", "trainer.ranks=2"]) == 0
    assert "can be served" in capsys.readouterr().out
    assert main([*words, "--set", "trainer.packing=true"]) == 2
    assert "trainer.packing is True" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_server_is_not_placed_as_if_it_recomputed_activations_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(Path(__file__).parents[4] / "configs" / "quickstart.toml")
    keys = ["policy.hidden_size=512", "policy.layers=8", "trainer.microbatch_tokens=16384"]
    keys.append("placement.trainer.memory_gb=3")
    words = ["serve", config, "--output", str(tmp_path / "out"), "--check"]
    assert main([*words, *(word for key in keys for word in ("--set", key))]) == 2
    assert "placement.trainer.memory_gb is 3" in capsys.readouterr().err


PAGE = Guide.read("serve.md")


def test_the_page_names_every_option_and_no_other() -> None:
    (commands,) = (one for one in make_parser()._actions if one.dest == "command")
    known = {word for one in commands.choices["serve"]._actions for word in one.option_strings}
    table = "\n".join(line for line in PAGE.text.splitlines() if line.startswith("| `--"))
    named = set(re.findall(r"--[a-z][a-z-]*", table))
    assert named == {one for one in known if one.startswith("--")} - {"--help"}


def test_the_page_names_every_loss() -> None:
    (row,) = (line for line in PAGE.text.splitlines() if line.startswith("| `forward`"))
    assert set(re.findall(r"`([a-z_]+)`", row)) - {"forward", "forward_backward"} == {
        *CLIENT_LOSSES
    }


def test_the_versions_of_the_page_are_those_that_are_tested() -> None:
    versions = re.search(r"SDKs\s+(\S+) to (\S+) are\s+supported", PAGE.text)
    assert versions is not None
    sessions = (ROOT / "tests" / "plugins" / "tinker" / "nox_sessions.py").read_text()
    (tested,) = re.findall(r"^SDKS = \((.*)\)$", sessions, re.MULTILINE)
    assert re.findall(r"[0-9.]+", tested) == [*versions.groups()]


def test_the_python_of_the_page_imports_public_names_of_the_client_library() -> None:
    (block,) = PAGE.blocks("python")
    (imported,) = [one for one in ast.parse(block).body if isinstance(one, ast.ImportFrom)]
    assert imported.module == "composer_mesh.plugins.tinker.client"
    assert {alias.name for alias in imported.names} <= set(client.__all__)
