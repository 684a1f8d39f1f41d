"""The guide to TRL: its code trains, its names exist, and its figures are logged.

What it says of AsyncGRPOTrainer is trained in tests/plugins/frameworks/procs/test_trl_async.py.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from guides import Guide, names_in_code
from trl_runs import pair_rows, qwen_call, qwen_policy, settings

from composer_mesh.tasks.toolbox import ToolboxTask

PAGE = Guide.read("trl.md")
THEIRS = {
    "async_grpo_trainer",
    "environment_factory",
    "fsdp_version",
    "generate_single_turn",
    "gradient_accumulation_steps",
    "heartbeat_stale_after_s",
    "num_generations",
    "rollout_func",
    "rollout_worker",
    "steps_per_generation",
    "tree_fa3",
    "test_trl_async",
    "test_trl_ranks",
    "weight_transfer",
}
"""Names of TRL and accelerate."""


def test_every_name_on_the_page_exists() -> None:
    assert PAGE.names() - names_in_code() - THEIRS == set()


def test_the_lines_of_trl_that_need_a_gpu_are_those_that_the_page_names() -> None:
    found = find_spec("trl")
    assert found is not None
    assert found.submodule_search_locations is not None
    folder = Path(found.submodule_search_locations[0])
    parts = ("experimental/async_grpo/async_grpo_trainer.py", "trainer/utils.py")
    trainer, utils = ((folder / part).read_text().splitlines() for part in parts)
    packing = (folder / "experimental/async_grpo/packing.py").read_text().splitlines()
    assert "get_peak_flops_per_device(" in trainer[1240 - 1]
    assert "TREE_ATTENTION" in trainer[1086 - 1]
    assert "torch.cuda.get_device_name(" in utils[1824 - 1]
    assert "get_kernel" in packing[161 - 1]
    assert "_flash_attn()" in packing[187 - 1]
    for line in (1240, 1824, 1086, 161, 187):
        assert str(line) in PAGE.text


@pytest.mark.filterwarnings("ignore")  # of TRL and what it imports
def test_the_python_of_the_page_trains_and_logs_the_figures_of_its_table(
    tmp_path: Path, toolbox: ToolboxTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps(row) + "\n" for row in pair_rows(toolbox)]
    Path("pairs.jsonl").write_text("".join(lines))
    from datasets import Dataset

    tokenizer, model = qwen_policy()

    def divide(a: int, b: int) -> float:
        """Divide two numbers.

        Args:
            a: The first.
            b: The second.

        Returns:
            The quotient.
        """
        return a / b

    changes = {"per_device_train_batch_size": 2, "num_generations": 2}
    rows = [{"prompt": [{"role": "user", "content": "Divide."}], "answer": "99"}]
    found: dict[str, Any] = {
        "model": model,
        "args": settings(tmp_path / "out", **changes, max_completion_length=128),
        "tokenizer": tokenizer,
        "train_dataset": Dataset.from_list(rows),
        "reward_funcs": lambda completions, **_: [0.0, 1.0][: len(completions)],
        "divide": divide,
        "task": toolbox,
    }
    blocks = [block for block in PAGE.blocks("python") if "MeshRollouts" not in block]
    logged, pairs = set[str](), 0
    for block in blocks:
        before = found.get("trainer")
        exec(block, found)
        trainer = found.get("trainer")
        if trainer is before:
            continue
        if "trainer.train()" not in block:
            said = tokenizer(qwen_call("nothing"), add_special_tokens=False).input_ids
            trainer._generate_single_turn = lambda ids, *_, s=said, **__: ([s] * len(ids), None)
            trainer.train()
        logged |= {name for line in trainer.state.log_history for name in line}
        pairs += hasattr(trainer, "_pair_source") and trainer._pair_source is not None
    assert pairs == 1
    assert found["rows"][0].keys() >= {"prompt", "split", "index"}
    assert len(found["dpo_rows"]) == len(lines)
    assert {
        "loss/policy",
        "loss/total",
        "loss/replay",
        "replay/pairs",
        "rollouts/success",
    } <= logged
    table = PAGE.text.partition("| figure |")[2].partition("\n\n")[0]
    for name in ("loss/", "sdpo/", "replay/", "rollouts/"):
        for one in logged:
            assert not one.startswith(name) or f"`{one}`" in table, one
