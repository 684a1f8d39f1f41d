"""TRL's GRPOTrainer where rewards are rare, against the baseline of an ablation of the same tasks.

    python benchmarks/trl_rare_rewards.py ABLATION... [--json FILE]

ABLATION is an output directory of `composer-mesh ablate`. For each finished run of its arm
"neither", TRL trains the same policy on the same episodes, with the same loss, optimizer, rates and
number of rollouts; its last policy plays the same held-out episodes, sampled as the run's are, by
`composer-mesh eval`. TRL waits for its rollouts, so the mesh's run has the lag of its config and
TRL's has none.

TRL's SDPOTrainer is not among the peers: it has neither tools nor a `rollout_func`, and its
episodes have one turn (docs/trl.md).
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from report import Report, arguments
from vs_trl_run import Recorded, record

from composer_mesh.actors.models.warm_start import prepare_policy
from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.plugins.ablation.plan import BASELINE, is_finished
from composer_mesh.services.directory.report import EVALUATIONS_FILE, read_evaluations
from composer_mesh.tasks.loading import make_task

HERE = Path(__file__).resolve().parent
ENV = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True)
class Peer:
    """One seed of a task: success of the last policies, and seconds of all steps of TRL."""

    seed: int
    mesh: float
    trl: float
    trl_s: float


def baselines(ablations: list[Path]) -> Iterator[tuple[Path, Config]]:
    """Yield the finished runs without channels, with their configs."""
    for ablation in ablations:
        for file in sorted(ablation.glob(f"**/{BASELINE}/seed-*/config.toml")):
            config = load_config(file)
            if is_finished(file.parent, config.run.steps):
                yield file.parent, config


def trained(config_file: Path, config: Config, folder: Path) -> Recorded:
    """Train with TRL as the run was trained; return what was seen, with its last policy."""
    policy, keep = prepare_policy(config, make_task(config)), folder / "policies"
    keep.mkdir(parents=True)
    rows = config.schedule.prompts_per_step * config.schedule.group_size
    command: list[object] = [HERE / "vs_trl_peer.py", config_file, policy, folder / "run"]
    command += ["--save-every", config.run.steps, "--rows", rows]
    return record([sys.executable, *map(str, command)], folder / "run", ENV, keep)


def success(policy: Path, config_file: Path, folder: Path) -> float:
    """Return the held-out success of a policy, over the episodes of the run's own evaluations."""
    command = [sys.executable, "-m", "composer_mesh", "eval", policy, "--task", config_file]
    command += ["--output", folder / "eval", "--report", folder / "eval.json"]
    subprocess.run(list(map(str, command)), stdout=subprocess.DEVNULL, check=True)
    (task,) = json.loads((folder / "eval.json").read_text())["tasks"].values()
    return float(task["success"]["mean"])


def compared(run: Path, config: Config, folder: Path) -> Peer:
    """Train and evaluate TRL's policy for one run."""
    file = run / "config.toml"
    peer = trained(file, config, folder)
    last = read_evaluations(run / EVALUATIONS_FILE)[-1]
    steps = config.run.steps
    found = success(peer.policies[steps], file, folder)
    return Peer(config.run.seed, last.success, found, peer.trained_s(steps))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("ablations", type=Path, nargs="+", metavar="ABLATION")
    options = parser.parse_args()
    report, by_task = Report("trl_rare_rewards"), dict[str, list[Peer]]()
    for run, config in baselines(options.ablations):
        with tempfile.TemporaryDirectory(prefix="trl-rare-") as place:
            one = compared(run, config, Path(place))
        by_task.setdefault(str(config.data.task), []).append(one)
        print(f"{config.run.name}: mesh {one.mesh:.2f}, TRL {one.trl:.2f}", flush=True)
        if options.quick:
            break
    if not by_task:
        raise SystemExit(
            f"no finished run of the arm {BASELINE!r} in {', '.join(map(str, options.ablations))}: "
            "name the output directory of composer-mesh ablate"
        )
    rows = []
    for task, found in by_task.items():
        means = {
            "mesh": statistics.fmean(one.mesh for one in found),
            "trl": statistics.fmean(one.trl for one in found),
        }
        report.figures |= {f"{task}_{name}_success": value for name, value in means.items()}
        report.figures[f"{task}_seeds"] = len(found)
        report.figures[f"{task}_trl_s"] = statistics.fmean(one.trl_s for one in found)
        seeds = ", ".join(str(one.seed) for one in found)
        rows.append([task, seeds, *(f"{value:.1%}" for value in means.values())])
    report.print_table("GRPO alone, held-out success", ["task", "seeds", "mesh", "TRL"], rows)
    report.finish(options.json)


if __name__ == "__main__":
    main()
