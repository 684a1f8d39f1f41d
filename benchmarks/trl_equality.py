"""The mesh's GRPO step against TRL's, on the same samples: the distance of the trained weights.

    python benchmarks/trl_equality.py [--quick] [--json FILE]

A run of the mesh trains the quickstart's policy with GRPO alone and without lag. TRL's GRPOTrainer
then trains the same first policy on the rollouts that the run has stored: same rewards, advantages,
loss, clip, optimizer and rates. `distance` is the norm of the difference of both trained policies
over the norm of the mesh's own change; 0 is equality. TRL comes from the extra `bench`.
"""

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from report import Report, arguments
from safetensors.torch import load_file
from torch import Tensor

from composer_mesh.actors.models.warm_start import prepare_policy
from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.services.store.reading import RunReader
from composer_mesh.tasks.loading import make_task

PRESET = Path(__file__).resolve().parent.parent / "configs" / "quickstart.toml"
STEPS, QUICK_STEPS = 12, 4
SETTINGS = (
    *("sdpo.alpha=0.0", "replay.beta=0.0", "schedule.max_lag=0", "eval.episodes=1"),
    "run.name=trl-equality",
)
WARM_START = ("policy.warm_start.steps=200",)
QUICK_WARM_START = ("policy.warm_start.steps=150", "policy.warm_start.demonstrations=600")


class Stored:
    """The rollouts of a run as TRL's `rollout_func`; a prompt is the number of its group."""

    def __init__(self, run: Path, config: Config) -> None:
        from vs_trl_episodes import Played

        self.played: list[Played] = []
        self._made, self._size = Played, config.schedule.group_size
        with RunReader(run) as reader:
            self._traces = {(trace.group_id, trace.sample): trace for trace in reader.all_traces()}

    def __call__(self, prompts: list[str], _trainer: Any) -> dict[str, Any]:
        self.played = [
            self._of(int(prompt), place % self._size) for place, prompt in enumerate(prompts)
        ]
        return {
            "prompt_ids": [one.prompt_ids for one in self.played],
            "completion_ids": [one.ids for one in self.played],
            "env_mask": [one.mask for one in self.played],
            "logprobs": None,
            "reward": [one.reward for one in self.played],
        }

    def _of(self, group: int, sample: int) -> Any:
        trace = self._traces[group, sample]
        first, ids = len(trace.turns[0].context_ids), trace.token_ids()
        mask = list(map(int, trace.action_mask()[first:]))
        return self._made(ids[:first], ids[first:], mask, trace.reward, trace.success)


def distance(one: Path, other: Path, first: Path) -> float:
    """Return |one - other| / |one - first| of three policies, all weights together."""
    policies = [load_file(folder / "model.safetensors") for folder in (one, other, first)]
    return _norm(policies[0], policies[1]) / _norm(policies[0], policies[2])


def _norm(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    squares = [(one[name].double() - other[name].double()).square().sum() for name in one]
    return float(torch.stack(squares).sum().sqrt())


def compared(steps: int, warm_start: tuple[str, ...], folder: Path) -> float:
    """Train both, and return the distance of their policies."""
    from vs_trl_peer import train

    settings = [*SETTINGS, *warm_start, f"run.steps={steps}", f"trainer.checkpoint_every={steps}"]
    config, run, peer = load_config(PRESET, settings), folder / "run", folder / "trl"
    first = prepare_policy(config, make_task(config))
    sets = [part for one in settings for part in ("--set", one)]
    command = [sys.executable, "-m", "composer_mesh", "train", str(PRESET), "--output", str(run)]
    subprocess.run([*command, *sets], check=True)
    rows = config.schedule.prompts_per_step * config.schedule.group_size
    train(config, first, peer, steps, rows, Stored(run, config))
    last = f"checkpoints/step-{steps}"
    return distance(run / last, peer / last, first)


def main() -> None:
    parser = arguments(__doc__ or "")
    given = parser.parse_args()
    report = Report("trl_equality")
    if importlib.util.find_spec("trl") is None:
        report.missing["distance"] = "trl is not installed: pip install 'composer-mesh[bench]'"
    else:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory(prefix="trl_equality-") as folder:
            steps = QUICK_STEPS if given.quick else STEPS
            warm_start = QUICK_WARM_START if given.quick else WARM_START
            report.ratios["distance"] = compared(steps, warm_start, Path(folder))
    report.finish(given.json)


if __name__ == "__main__":
    main()
