"""A larger model is trained first, and teaches a smaller one of the same tokenizer afterwards.

    pip install ./examples/larger_teacher
    larger-teacher examples/larger_teacher

trains `large.toml`, whose last checkpoint is a model folder, and then `small.toml` with that folder
as `sdpo.teacher_model.path`. Built-in tokenizers are learned from the demonstrations alone, so
policies of any size have the same one if data, seed and vocabulary are the same; `train` compares
them before the teacher is used.
"""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

COMMAND = [sys.executable, "-P", "-m", "composer_mesh"]


def train(config: Path, *settings: str) -> Path:
    """Train a config unless its run is finished; return its run directory."""
    table = tomllib.loads(config.read_text(encoding="utf-8"))
    output = Path("runs") / table["run"]["name"]
    overrides = [part for setting in settings for part in ("--set", setting)]
    if not (output / "summary.json").is_file():
        subprocess.run([*COMMAND, "train", str(config), *overrides], check=True)
    return output


def last_checkpoint(run: Path) -> Path:
    """Return the model folder with which a run ended."""
    found = (run / "checkpoints").glob("step-*")
    return max(found, key=lambda one: int(one.name.removeprefix("step-")))


def main() -> None:
    """Train both, and print what each of them solves of the held-out episodes."""
    configs = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    large = train(configs / "large.toml")
    teacher = last_checkpoint(large)
    small = train(configs / "small.toml", f"sdpo.teacher_model.path={json.dumps(str(teacher))}")
    for run in (large, small):
        evaluated = json.loads((run / "summary.json").read_text(encoding="utf-8"))["eval"]
        before, after = (evaluated[when]["success"] for when in ("initial", "final"))
        sys.stdout.write(
            f"{run.name}: {before:.0%} of held-out episodes before, {after:.0%} after\n"
        )
