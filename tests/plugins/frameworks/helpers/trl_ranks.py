"""One process of a TRL run with three channels, as torch.distributed.run or accelerate starts it.

    python -m torch.distributed.run --nproc-per-node 2 trl_ranks.py FOLDER STEPS

FOLDER has a policy; each rank writes `rank-R.json` there: its log, and a hash of its weights.
"""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--hang-at", type=int, default=-1)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()

    import torch
    from transformers import TrainerCallback
    from trl_runs import GROUP, PROMPTS, make_trainer, pair_rows

    from composer_mesh.actors.models.policy import load_model
    from composer_mesh.actors.models.tokenizer import load_tokenizer
    from composer_mesh.configs.preference import WeightedPreferenceConfig
    from composer_mesh.configs.sdpo import SdpoConfig
    from composer_mesh.plugins.frameworks.trl.pairs import StoredPairs
    from composer_mesh.tasks.task import TaskSettings
    from composer_mesh.tasks.toolbox import ToolboxTask

    torch.set_num_threads(1)
    task = ToolboxTask.create(TaskSettings(seed=3, tool_error_penalty=0.1))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))

    class Hangs(TrainerCallback):
        """Waits at a step to be killed, and says that it does."""

        def on_step_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == options.hang_at:
                (options.folder / "hangs").touch()
                time.sleep(600)

    trainer = make_trainer(
        task,
        load_tokenizer(options.folder),
        load_model(options.folder),
        options.folder / "out",
        steps=options.steps,
        sdpo=SdpoConfig(alpha=0.5),
        replay=WeightedPreferenceConfig(beta=0.3),
        pairs=StoredPairs(pair_rows(task), per_step=3),
        callbacks=[Hangs()],
        max_context=512,
        settings_of={
            "per_device_train_batch_size": GROUP * PROMPTS // ranks,
            "save_strategy": "steps" if options.save else "no",
            "save_steps": 1,
        },
    )
    before = digest(trainer.model.state_dict())
    trainer.train(resume_from_checkpoint=options.resume)
    found = {
        "before": before,
        "weights": digest(trainer.accelerator.get_state_dict(trainer.model_wrapped)),
        "logs": [one for one in trainer.state.log_history if "loss" in one],
    }
    rank = trainer.accelerator.process_index
    (options.folder / f"rank-{rank}.json").write_text(json.dumps(found))


def digest(weights: dict[str, Any]) -> str:
    """A hash of all weights."""
    found = hashlib.sha256()
    for _, one in sorted(weights.items()):
        found.update(one.cpu().numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()
