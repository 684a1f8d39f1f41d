"""What many unit tests build: a small config, the built-in tokenizer, a tiny random model.

The conftest of tests/unit and that of tests/plugins import it.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from surroundings import as_before, forget_surroundings  # noqa: F401

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.environment import IMPORT_PATHS
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.task import TaskSettings
from composer_mesh.tasks.toolbox import ToolboxTask

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "unit" / "helpers"))
sys.path.append(str(TESTS.parent / "benchmarks"))
sys.path.extend(map(str, TESTS.glob("plugins/*/helpers")))

# The same examples each time, so that a failure is of the change that it comes with; `nox -s fuzz`
# draws others. One that takes long on a busy machine is no failure: no test here is about time.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None)
settings.load_profile("repeatable")

forget_surroundings()
STATE_HOME = tempfile.TemporaryDirectory(prefix="state-")
os.environ["XDG_STATE_HOME"] = STATE_HOME.name  # where an account keeps its signing key

BuildConfig = Callable[..., Config]
BuildModel = Callable[[int], Any]
WriteModule = Callable[[str, str], None]

SECTIONS: dict[str, dict[str, Any]] = {
    "run": {"name": "unit", "seed": 3, "steps": 3},
    "data": {"task": "toolbox"},
    "environment": {"max_turns": 6, "tool_error_penalty": 0.1},
    "policy": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 400,
        "max_context": 512,
    },
    "generator": {"max_new_tokens": 64},
    "schedule": {"prompts_per_step": 2, "group_size": 3, "max_lag": 0},
    "eval": {"episodes": 4},
}


@pytest.fixture
async def environment_actor() -> AsyncIterator[Callable[[], Any]]:
    """Makes environment actors, whose task processes end with the test."""
    from composer_mesh.actors.environment import EnvironmentActor

    made: list[EnvironmentActor] = []

    def make() -> EnvironmentActor:
        made.append(EnvironmentActor())
        return made[-1]

    yield make
    for actor in made:
        await actor.__cleanup__(None)


@pytest.fixture(scope="session")
def build_config() -> BuildConfig:
    """A small run; keywords are sections whose keys replace the small run's."""

    def build(**sections: dict[str, Any]) -> Config:
        names = {*SECTIONS, *sections}
        if "mixture" in sections.get("data", {}):
            sections["data"] = {"task": None, **sections["data"]}
        return Config.model_validate(
            {name: {**SECTIONS.get(name, {}), **sections.get(name, {})} for name in names}
        )

    return build


@pytest.fixture(scope="session")
def toolbox() -> ToolboxTask:
    return ToolboxTask.create(TaskSettings(seed=3, tool_error_penalty=0.1))


@pytest.fixture(scope="session")
def corpus(toolbox: ToolboxTask) -> list[str]:
    """Questions and right first actions, enough for a tokenizer to learn the words."""
    from composer_mesh.actors.models.policy import frame

    texts = [frame(toolbox.tools)] * 40
    for index in range(40):
        messages = SyncSession(toolbox, toolbox.episode("train", index)).messages
        texts += [messages[-1]["content"], toolbox.expert(messages)]
    return texts


@pytest.fixture(scope="session")
def tokenizer(corpus: list[str]) -> Any:
    """The built-in tokenizer with the built-in chat template."""
    from composer_mesh.actors.models.policy import build_tokenizer

    return build_tokenizer(corpus, 400)


@pytest.fixture(scope="session")
def build_model(build_config: BuildConfig, tokenizer: Any) -> BuildModel:
    """A tiny Qwen3 by seed, its weights wide enough for sharp and context-dependent predictions."""
    import torch

    from composer_mesh.actors.models import policy

    def build(seed: int) -> Any:
        model = policy.build_model(build_config().policy, tokenizer, seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weights in model.parameters():
                if weights.dim() > 1:
                    weights.normal_(std=0.3, generator=generator)
        return model.eval()

    return build


@pytest.fixture(scope="session")
def policy_folder(
    build_model: BuildModel, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a tiny policy, which tests only read."""
    folder = tmp_path_factory.mktemp("policy")
    build_model(1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def ranks() -> Iterator[Any]:
    """One rank, whose process group is gone after the test."""
    import torch.distributed as dist

    from composer_mesh.actors.models.ranks import Ranks

    yield Ranks()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def make(build_config: BuildConfig, build_model: BuildModel) -> Callable[..., Any]:
    """A model by seed and its step, configured by sections, at a rate that can be seen."""
    from composer_mesh.actors.learning.step import OptimizerStep

    def build(seed: int = 1, *, reference: int | None = 1, **sections: Any) -> Any:
        sections["trainer"] = {"lr": 1e-2, **sections.get("trainer", {})}
        model, config = build_model(seed), build_config(**sections)
        frozen = None if reference is None else build_model(reference).requires_grad_(False)
        return model, OptimizerStep(model, frozen, config)

    return build


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WriteModule]:
    """A user's module by name and source, in the working directory and importable."""
    written = []

    def write(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)
        written.append(name)
        importlib.invalidate_caches()

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(IMPORT_PATHS, str(tmp_path))
    yield write
    for name in written:
        sys.modules.pop(name, None)


@pytest.fixture
def rng() -> random.Random:
    return random.Random(0)
