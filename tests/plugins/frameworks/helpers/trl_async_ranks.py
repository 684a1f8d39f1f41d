"""One process of AsyncGRPOTrainer on the mesh: `trl_async_ranks.py FOLDER PROCESSES [--peft]`.

Writes what it has logged, and the sum of its weights' bytes, to rank-N.json in the folder.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}

import torch
from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl_on_cpu import named_cpu

from composer_mesh.configs.load import load_config
from composer_mesh.plugins.frameworks.trl.async_grpo import MeshRollouts
from composer_mesh.plugins.frameworks.trl.rollouts import episode_rows

PRESET = Path(__file__).parents[4] / "configs" / "quickstart.toml"
STEPS, SAMPLES = 3, 8
SETTINGS = (
    *("sdpo.alpha=0", "replay.beta=0", "schedule.group_size=4", "schedule.max_lag=2"),
    *("policy.warm_start.steps=150", "policy.warm_start.demonstrations=600"),
)


def main(folder: Path, processes: int, adapters: bool) -> None:
    torch.set_num_threads(1)
    config = load_config(PRESET, [*SETTINGS, f"policy.cache_dir={folder.parent / 'policies'}"])
    args = AsyncGRPOConfig(
        str(folder / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=SAMPLES // processes,
        num_generations=4,
        max_staleness=2,
        token_budget=0,
        learning_rate=1e-3,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    mesh = MeshRollouts(config, args)
    rows = Dataset.from_list(episode_rows(100))
    options: dict[str, Any] = {"rollout_worker": mesh, "weight_transfer": mesh}
    if adapters:
        from peft import LoraConfig

        options["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    with named_cpu():
        trainer = AsyncGRPOTrainer(mesh.model, args=args, train_dataset=rows, **options)
    trainer.train()
    digest = hashlib.sha256()
    for weights in trainer.accelerator.unwrap_model(trainer.model).state_dict().values():
        digest.update(weights.numpy().tobytes())
    found = {"weights": digest.hexdigest(), "logs": trainer.state.log_history}
    rank = trainer.accelerator.process_index
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), "--peft" in sys.argv)
