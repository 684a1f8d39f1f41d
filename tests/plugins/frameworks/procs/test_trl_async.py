"""TRL's AsyncGRPOTrainer on the mesh, by the code of the guide, with a generator that is killed."""

import gc
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from guides import Guide
from torch import Tensor
from trl_on_cpu import named_cpu

from composer_mesh.actors.models.policy import load_model
from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.processes import is_alive
from composer_mesh.plugins.frameworks.trl.async_stream import MeshFailed
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.rows import GroupRow

PRESET = Path(__file__).parents[4] / "configs" / "quickstart.toml"
STEPS, KILLED_AT, STALENESS, GROUP, SAMPLES = 8, 2, 2, 4, 8
SETTINGS = {
    "sdpo.alpha": 0,
    "replay.beta": 0,
    "policy.warm_start.steps": 150,
    "policy.warm_start.demonstrations": 600,
    "schedule.group_size": GROUP,
    "schedule.max_lag": STALENESS,
    "supervision.backoff_s": 0.1,
}
Weights = dict[str, Tensor]
pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL and what it imports


def run_config(policy_cache: Path, **changes: Any) -> Config:
    settings = {**SETTINGS, **changes, "policy.cache_dir": policy_cache}
    return load_config(PRESET, [f"{name}={value}" for name, value in settings.items()])


def trainer_settings(folder: Path) -> Any:
    from trl.experimental.async_grpo import AsyncGRPOConfig

    return AsyncGRPOConfig(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=SAMPLES,
        num_generations=GROUP,
        max_staleness=STALENESS,
        token_budget=0,
        learning_rate=1e-3,
        weight_decay=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def made_by_the_guide(config: Config, args: Any) -> Any:
    """The trainer that the guide's code makes of a config and TRL's settings."""
    from datasets import Dataset

    from composer_mesh.plugins.frameworks.trl.rollouts import episode_rows

    found: dict[str, Any] = {"config": config, "args": args}
    found |= {"Dataset": Dataset, "episode_rows": episode_rows}
    (block,) = (one for one in Guide.read("trl.md").blocks("python") if "MeshRollouts" in one)
    with named_cpu():
        exec(block, found)
    return found["trainer"]


def killing(trainer: Any, root: Path, sent: dict[int, Weights]) -> Any:
    """A callback that keeps the weights of each version, and kills the generator after a sync."""
    from transformers import TrainerCallback

    class Killing(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            state = trainer.model.state_dict()
            sent[trainer.model_version] = {name: one.clone() for name, one in state.items()}

        def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            self.on_train_begin()
            if state.global_step == KILLED_AT:
                os.kill(started(root)["generator-0"], signal.SIGKILL)

    return Killing()


def events(root: Path) -> list[dict[str, Any]]:
    complete = (root / "events.jsonl").read_text().split("\n")[:-1]
    return [json.loads(line) for line in complete]


def started(root: Path) -> dict[str, int]:
    """The processes of the actors, by name."""
    found = [one for one in events(root) if one["event"] == "actor_started"]
    return {one["actor"]: int(re.findall(r"\d+", one["detail"])[0]) for one in found}


def stored(root: Path) -> tuple[list[GroupRow], list[Trace]]:
    with RunReader(root) as reader:
        return reader.groups(), list(reader.all_traces())


def errors(model: Any, weights: Weights, trace: Trace, version: int) -> Tensor:
    """How far the log-probs of a version's tokens are from those of some weights."""
    model.load_state_dict(weights)
    ids = torch.tensor([trace.token_ids()])
    with torch.no_grad():
        found = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    turns = trace.turns
    wanted = [p for turn in turns for p in [0.0] * len(turn.context_ids) + turn.logprobs]
    versions = [v for turn in turns for v in [-1] * len(turn.context_ids) + turn.versions]
    chosen = torch.tensor(versions[1:]) == version
    return (found - torch.tensor(wanted[1:]))[chosen].abs()


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_a_training_goes_on_when_its_generator_is_killed_with_the_weights_sent_last(
    tmp_path: Path, policy_cache: Path
) -> None:
    trainer = made_by_the_guide(run_config(policy_cache), trainer_settings(tmp_path / "out"))
    root, sent = tmp_path / "out" / "rollouts", dict[int, Weights]()
    trainer.add_callback(killing(trainer, root, sent))
    thresholds = gc.get_threshold()
    trainer.train()

    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() == 0
    assert trainer.state.global_step == STEPS
    assert sorted(sent) == list(range(1, STEPS + 2))
    kinds = [(one["event"], one["actor"]) for one in events(root)]
    assert ("actor_died", "generator-0") in kinds
    assert ("actor_restarted", "generator-0.2") in kinds
    assert not any(map(is_alive, started(root).values()))

    logs = [line for line in trainer.state.log_history if "loss" in line]
    assert logs[0]["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert max(line["sample/staleness_max"] for line in logs) <= STALENESS
    assert not any("sample/dropped_stale_total" in line for line in logs)
    assert sum(line.get("rollout/dropped_stale_total", 0) for line in logs) == 0
    assert sum(line.get("rollout/restarts_total", 0) for line in logs) == 1
    assert any(line["grad_norm"] > 0 for line in logs)

    groups, traces = stored(root)
    trained = {row.group_id for row in groups[: STEPS * SAMPLES // GROUP]}
    names = [trace.trace_id for trace in traces if trace.group_id in trained]
    assert len(names) == len(set(names)) == STEPS * SAMPLES
    entered = {row.group_id: row.entered for row in groups}
    assert all(trace.oldest_version() >= entered[trace.group_id] for trace in traces)
    newest = max(trace.oldest_version() for trace in traces)
    assert newest >= STEPS - STALENESS > KILLED_AT + 1

    model = load_model(Path(trainer.rollout_worker.model))
    own, other = [], []
    for trace in traces:
        for version in set(trace.versions()):
            own.append(errors(model, sent[version], trace, version))
            if version > 1:
                other.append(errors(model, sent[version - 1], trace, version))
    assert torch.cat(own).max() < 1e-3
    assert torch.cat(other).mean() > 10 * torch.cat(own).mean()


def test_a_mesh_that_cannot_go_on_ends_the_training_with_the_cause(
    tmp_path: Path, policy_cache: Path
) -> None:
    config = run_config(policy_cache, **{"supervision.restarts": 0})
    trainer = made_by_the_guide(config, trainer_settings(tmp_path / "out"))
    root = tmp_path / "out" / "rollouts"
    trainer.add_callback(killing(trainer, root, {}))
    with pytest.raises(MeshFailed, match=r"generator-0 died: .*Killed"):
        trainer.train()
    assert KILLED_AT <= trainer.state.global_step < STEPS
    assert not any(map(is_alive, started(root).values()))
    with pytest.raises(RuntimeError, match="the mesh does not run"):
        trainer.rollout_worker.check_health(300.0)
