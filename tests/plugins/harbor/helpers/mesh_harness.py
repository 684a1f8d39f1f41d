"""Runs in which harnesses play the example tasks through a mesh, with the expert's engine.

The model is random, in float32, with 64 k positions; its weights are wide enough that a token's
log-prob depends on the whole context.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import expert_engine
from agent_templates import FAMILIES
from python_image import python_root, with_image
from repository import ROOT
from strangers import Environment, install

from composer_mesh.actors.models.policy import build_tokenizer
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.store.reading import RunReader

EXAMPLES = ROOT / "examples" / "harbor"
NOT_FOR_HARNESSES = ("mcp-*", "steps-*", "README.md")
"""Harnesses get no MCP servers; the expert knows the tasks of one step."""
POSITIONS = 65_536
VOCABULARY = 8192
INITIAL_RANGE = 0.2
REGISTERS = {"composer_mesh.engines": "expert = expert_engine:start"}
ADVANTAGE = """
import torch

from composer_mesh import AdvantageInputs, AdvantageOutputs


def reward(inputs: AdvantageInputs) -> AdvantageOutputs:
    rewards = [[each["reward"] for each in group] for group in inputs.rollouts]
    return AdvantageOutputs(torch.tensor(rewards))
"""
"""All rewards are 1: against the mean of a group nothing would be trained."""
CONFIG = """
[run]
name = "harnesses"
steps = {steps}
import_paths = ["."]
[data]
task = "harbor"
path = "tasks"
[environment]
max_turns = 20
[environment.sandbox]
kind = "containers"
options = {{ backend = "bubblewrap", cache = "{cache}", most = 4 }}
[policy]
path = "{policy}"
max_context = {positions}
[generator]
engine = "expert"
max_concurrent = 4
max_new_tokens = 1000
[trainer]
lr = 1e-3
microbatch_tokens = {positions}
prefix_sharing = true
checkpoint_every = 0
[schedule]
prompts_per_step = {prompts}
group_size = 2
max_lag = 0
[advantage]
type = "custom"
import_path = "advantage.reward"
[logprob_mismatch]
all_tokens = true
[replay]
beta = 0.0
[eval]
episodes = 1
[rollouts]
workflow = "composer_mesh.plugins.harbor.harness_agent:HarnessAgent"
[rollouts.options]
{options}
"""


@dataclass(frozen=True)
class Served:
    """What the engine has answered to one request."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    versions: list[int]


@dataclass(frozen=True)
class FinishedRun:
    """A run in which a harness has played: what it stored, and what the engine has served."""

    folder: Path

    @property
    def steps(self) -> list[dict[str, Any]]:
        lines = (self.folder / "run" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def traces(self) -> list[Trace]:
        with RunReader(self.folder / "run") as reader:
            return list(reader.all_traces())

    def served(self) -> dict[str, Served]:
        """Answers by the id of their request."""
        lines = (self.folder / expert_engine.SERVED).read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return {
            row["request"]: Served(row["prompt"], row["ids"], row["logprobs"], row["versions"])
            for row in rows
        }


class HarnessRuns:
    """A folder with an image, tasks, a policy and an environment, in which runs are made."""

    def __init__(self, folder: Path, programs: Sequence[Path] = ()) -> None:
        """The image has the libraries of `programs` too."""
        self._folder = folder
        root = python_root(folder / "root", programs)
        with_image(EXAMPLES, folder / "tasks", root)
        for pattern in NOT_FOR_HARNESSES:
            for one in (folder / "tasks").glob(pattern):
                shutil.rmtree(one) if one.is_dir() else one.unlink()
        save_random_policy(folder / "policy")
        self._environment = Environment.make(folder / "environment")
        source = Path(expert_engine.__file__).read_text()
        files = {"expert_engine.py": source, "advantage.py": ADVANTAGE}
        install(self._environment.packages, "expert_engine", files, REGISTERS)

    def train(self, name: str, steps: int, prompts: int, **options: object) -> FinishedRun:
        """Return a run of `steps` with two episodes of each prompt, by these `rollouts.options`."""
        folder = self._folder / name
        shutil.copytree(self._folder / "policy", folder / "policy")
        (folder / "tasks").symlink_to(self._folder / "tasks")
        text = CONFIG.format(
            steps=steps,
            prompts=prompts,
            options=toml(options),
            positions=POSITIONS,
            policy=folder / "policy",
            cache=self._folder / "cache",
        )
        (folder / "run.toml").write_text(text)
        done = self._environment.run("train", "run.toml", "--output", "run", cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return FinishedRun(folder)


def save_random_policy(folder: Path) -> None:
    """Write a random decoder of two layers, and a tokenizer that was trained on the docs."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    texts = [one.read_text() for one in sorted(ROOT.glob("docs/**/*.md"))]
    texts += [one.read_text() for one in sorted(ROOT.glob("configs/*.py"))]
    tokenizer = build_tokenizer(texts, VOCABULARY)
    tokenizer.chat_template = FAMILIES["qwen"]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        initializer_range=INITIAL_RANGE,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def toml(options: Mapping[str, Any]) -> str:
    """Return options as lines of a table; those of a table in it have dotted keys."""
    rows = dict[str, object]()
    for key, value in options.items():
        inner = value if isinstance(value, Mapping) else None
        rows |= {key: value} if inner is None else {f"{key}.{one}": inner[one] for one in inner}
    return "\n".join(f"{key} = {json.dumps(value)}" for key, value in rows.items())
