"""Three channels inside of TRL against the mesh: held-out success on the quickstart's task.

    python benchmarks/trl_channels.py [--quick] [--json FILE]

Both train the quickstart's tiny Qwen3 from one warm start, on the same episodes, with the same
hints, builtin teachers, losses, optimizer and rates, in a synchronous schedule. Their last policies
play 200 held-out episodes, greedily, by one evaluator. `--quick` trains 8 steps, where both are
still learning, so its difference is not judged.
"""

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from report import Report, arguments
from vs_trl import PRESET, Greedy
from vs_trl_episodes import Player
from vs_trl_run import Recorded, record

from composer_mesh.actors.models.tokenizer import load_tokenizer
from composer_mesh.actors.models.warm_start import prepare_policy
from composer_mesh.configs.load import dump_toml, load_config
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.tasks.loading import make_task

HERE = Path(__file__).resolve().parent
STEPS, QUICK_STEPS = 70, 8
EPISODES, QUICK_EPISODES = 200, 50
BAR = 0.03
"""Difference in success that the two may have."""
ENV = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def sides(config: Config, policy: Path, folder: Path) -> dict[str, Recorded]:
    """Run both sides, one after the other."""
    file = folder / "config.toml"
    file.write_text(dump_toml(config))
    commands: dict[str, Sequence[object]] = {
        "trl": [HERE / "trl_channels_peer.py", file, policy, folder / "trl", "--rows", 48],
        "mesh": ["-m", "composer_mesh", "train", file, "--output", folder / "mesh"],
    }
    found = {}
    for name, command in commands.items():
        keep = folder / f"{name}-policies"
        keep.mkdir()
        words = [sys.executable, *map(str, command)]
        found[name] = record(words, folder / name, ENV if name == "trl" else {}, keep)
    return found


def success(config: Config, policy: Path, episodes: int) -> float:
    """Return the share of held-out episodes that a policy solves, greedily."""
    task, tokenizer = make_task(config), load_tokenizer(policy)
    player = Player(config, task, ChatFormat(tokenizer, task.tools))
    greedy = Greedy(policy, config.generator.max_new_tokens, tokenizer)
    played = player.play([task.episode("heldout", index) for index in range(episodes)], greedy)
    return statistics.mean(one.success for one in played)


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    steps, episodes = (QUICK_STEPS, QUICK_EPISODES) if options.quick else (STEPS, EPISODES)
    torch.set_num_threads(1)
    settings = [f"run.steps={steps}", "schedule.max_lag=0", "eval.episodes=1"]
    config = load_config(PRESET, settings)
    policy = prepare_policy(config, make_task(config))
    report, rows = Report("trl_channels"), []
    with tempfile.TemporaryDirectory(prefix="trl-channels-") as place:
        for name, run in sides(config, policy, Path(place)).items():
            found = success(config, run.policies[max(run.policies)], episodes)
            report.figures |= {f"{name}_success": found, f"{name}_s": run.trained_s(steps)}
            rows.append([name, f"{found:.3f}", f"{run.trained_s(steps):.0f}"])
    report.figures |= {"steps": steps, "episodes": episodes}
    report.print_table("Held-out success", ["", "success", f"s of {steps} steps"], rows)
    figures = report.figures
    difference = abs(float(figures["trl_success"]) - float(figures["mesh_success"]))
    report.ratios["success_difference"] = difference
    report.finish(options.json)
    if not options.quick and difference > BAR:
        raise SystemExit(f"success differs by {difference:.3f}, more than {BAR}")


if __name__ == "__main__":
    main()
