"""A supervised run: its config, its conversations, and the loss of its steps."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import ROOT

from composer_mesh.configs.changes import changes
from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.load import dump_toml, load_config, resolve_config
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.services.checks.task import check_task
from composer_mesh.services.directory.claim import RunDirectoryError
from composer_mesh.services.sft.config import sft_config
from composer_mesh.services.sft.run import Dataset, load_dataset, refuse_other
from composer_mesh.services.steps.step_manifest import StepManifest, manifest_to_json
from composer_mesh.services.store.rows import StepRow, StepState
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.playing import Demonstration
from composer_mesh.tasks.rows import Row
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.toolbox import ToolboxTask

SFT = {"steps": 4, "batch_size": 4, "demonstrations": 10}


@pytest.fixture
def chat(tokenizer: Any, toolbox: ToolboxTask) -> ChatFormat:
    return ChatFormat(tokenizer, toolbox.tools)


@pytest.fixture
def make_config(build_config: Any) -> Any:
    def build(sft: dict[str, Any] | None = None, **sections: Any) -> Config:
        return sft_config(build_config(sft={**SFT, **(sft or {})}, **sections))

    return build


def silent(_done: int) -> None:
    pass


def test_a_name_that_leaves_no_room_for_that_of_the_supervised_run_is_refused(
    make_config: Any,
) -> None:
    assert make_config(run={"name": "a" * 96}).run.name.endswith("a-sft")
    with pytest.raises(ConfigError, match=r"has 98 characters.*: shorten it by 2"):
        make_config(run={"name": "a" * 98})


@pytest.mark.plugins
@pytest.mark.parametrize(
    "name", ["quickstart", "tool-chains", "home-devices", "one-liners", "qwen3-8b"]
)
def test_the_config_of_a_supervised_run_can_be_written_and_read(name: str, tmp_path: Path) -> None:
    settings = ["sft.steps=3", "sft.demonstrations=8"]
    settings += ["data.task=toolbox"] if name == "qwen3-8b" else []
    path = ROOT / "configs" / f"{name}.toml"
    config = sft_config(load_config(path, settings, model_later=True))
    copy = tmp_path / "config.toml"
    copy.write_text(dump_toml(config))
    assert dump_toml(load_config(copy, model_later=True)) == dump_toml(config)
    assert (config.run.name, config.run.steps) == (f"{name}-sft", 3)
    assert not any(one.on for one in config.weighted_channels.values())
    assert config.generator.temperature == 1.0


def test_a_config_without_the_section_is_refused(build_config: Any) -> None:
    with pytest.raises(ConfigError, match=r"no section \[sft\]: add it with steps"):
        sft_config(build_config())


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"steps": 1}, "nothing to imitate: set sft.path"),
        ({"steps": 1, "path": "a.jsonl", "error_rate": 0.5}, "about demonstrations alone"),
        ({"steps": 1, "demonstrations": 1, "hinted_share": 0.5}, "replaces a wrong action"),
    ],
)
def test_a_section_without_conversations_or_effect_is_refused(
    section: dict[str, Any], why: str
) -> None:
    table = {"run": {"name": "a", "steps": 1}, "data": {"task": "toolbox"}, "sft": section}
    with pytest.raises(ConfigError, match=why):
        resolve_config(table, [], "config")


def test_keys_of_reinforcement_learning_do_not_change_a_supervised_run(make_config: Any) -> None:
    others = {"loss": {"type": "cispo"}, "trainer": {"lr": 1.0, "lr_schedule": "cosine"}}
    assert changes(make_config(), make_config(**others, schedule={"max_lag": 3})) == []
    (rate,) = changes(make_config(), make_config({"lr": 1.0}))[-1:]
    assert not rate.safe


def test_the_task_of_a_supervised_run_may_have_other_options(build_config: Any) -> None:
    data = {"task": "tool_chains", "options": {"calls": 2}}
    config = build_config(sft={**SFT, "options": {"calls": 3}}, data=data)
    assert sft_config(config).data.options == {"calls": 3}
    with pytest.raises(ValueError, match=r"sft\.options are set but data\.mixture has several"):
        build_config(sft={**SFT, "options": {"a": 1}}, data={"mixture": [{"task": "toolbox"}]})


def test_each_epoch_has_every_conversation_once_in_an_order_of_its_own(
    make_config: Any, toolbox: ToolboxTask, chat: ChatFormat
) -> None:
    config = make_config()
    dataset, same = (load_dataset(config, toolbox, chat, silent) for _ in range(2))
    names = [[one.trace_id for one in dataset.batch(step).samples] for step in range(5)]
    assert names == [[one.trace_id for one in same.batch(step).samples] for step in range(5)]
    flat = [name for step in names for name in step]
    assert Counter(flat).most_common(1)[0][1] == 1
    epochs = [[name.partition(" of ")[0] for name in flat[at : at + 10]] for at in (0, 10)]
    assert set(epochs[0]) == set(epochs[1]) == {f"episode {n}" for n in range(10)}
    assert epochs[0] != epochs[1]
    assert [dataset.epoch(step) for step in (0, 4)] == [0.4, 2.0]
    other = load_dataset(
        config.model_copy(update={"run": config.run.model_copy(update={"seed": 9})}),
        toolbox,
        chat,
        silent,
    )
    assert [one.trace_id for one in other.batch(0).samples] != names[0]


def test_longer_conversations_are_left_out_and_named(
    make_config: Any, toolbox: ToolboxTask, chat: ChatFormat, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    said = {"role": "assistant", "content": "Answer: 4"}
    rows = [[{"role": "user", "content": "4? " * count}, said] for count in (1, 1000, 1, 1000)]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    config = make_config({"path": path, "demonstrations": 0, "batch_size": 2})
    dataset = load_dataset(config, toolbox, chat, silent)
    assert [one.name for one in dataset.rows] == ["row 1", "row 3"]
    assert str(dataset).endswith("2 longer than policy.max_context are left out: row 2, row 4")
    path.write_text(json.dumps({"messages": rows[1]}) + "\n")
    with pytest.raises(UnusableTask, match="no conversation remains to imitate: 1 are longer than"):
        load_dataset(config, toolbox, chat, silent)


@pytest.mark.parametrize("split", ["test", "Validation", "held-out"])
def test_rows_that_say_they_are_held_out_are_not_imitated(
    split: str, make_config: Any, toolbox: ToolboxTask, chat: ChatFormat, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    messages = [{"role": "user", "content": "4?"}, {"role": "assistant", "content": "Answer: 4"}]
    rows = [{"messages": messages, "split": one} for one in (split, "train", None)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_config({"path": path, "demonstrations": 0, "batch_size": 2})
    dataset = load_dataset(config, toolbox, chat, silent)
    assert [one.name for one in dataset.rows] == ["row 2", "row 3"]
    assert str(dataset).endswith("; held out by the column 'split': 1")


def test_a_folder_of_datasets_is_read_without_its_test_split(
    make_config: Any, toolbox: ToolboxTask, chat: ChatFormat, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets", exc_type=ModuleNotFoundError)
    messages = [{"role": "user", "content": "4?"}, {"role": "assistant", "content": "Answer: 4"}]
    one = datasets.Dataset.from_list([{"messages": messages}] * 3)
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(str(tmp_path / "rows"))
    section = {"path": tmp_path / "rows", "demonstrations": 0, "batch_size": 2}
    dataset = load_dataset(make_config(section), toolbox, chat, silent)
    assert (len(dataset.rows), dataset.held_out) == (3, 3)


def test_more_conversations_a_step_than_there_are_is_refused(
    make_config: Any, toolbox: ToolboxTask, chat: ChatFormat
) -> None:
    with pytest.raises(UnusableTask, match=r"sft\.batch_size is 11 but there are 10 conversations"):
        load_dataset(make_config({"batch_size": 11}), toolbox, chat, silent)


class Stated(Task):
    """A task without an expert whose rows state what to do."""

    name = "stated"

    def load(self) -> None:
        self._rows = [{"q": f"question {n}", "a": f"answer {n}"} for n in range(4)]

    def rows(self, split: Any) -> list[Row]:
        return list(self._rows)

    def prompt(self, row: Row) -> list[dict[str, Any]]:
        system = {"role": "system", "content": "Be brief."}
        return [system, {"role": "user", "content": row["q"]}]

    def gold(self, row: Row) -> list[str]:
        return [row["a"]]


def test_a_task_without_an_expert_is_demonstrated_by_its_gold_actions(
    make_config: Any, tokenizer: Any
) -> None:
    task = Stated()
    task.load()
    chat, config = ChatFormat(tokenizer, []), make_config({"demonstrations": 4})
    dataset = load_dataset(config, task, chat, silent)
    for one, row in zip(dataset.rows, task.rows("train"), strict=True):
        assert one.ids.tolist() == chat.first_prompt(task.prompt(row)) + chat.action(row["a"])
    check_task(
        config.model_copy(update={"policy": config.policy.model_copy(update={"path": "m"})}), task
    )


def test_demonstrations_of_a_task_that_has_none_are_refused(make_config: Any) -> None:
    with pytest.raises(UnusableTask, match="has neither an expert nor gold actions: define expert"):
        check_task(make_config(), Task())


def test_a_resume_on_other_conversations_is_refused(
    make_config: Any, toolbox: ToolboxTask, chat: ChatFormat
) -> None:
    first, other = (
        load_dataset(make_config({"demonstrations": count}), toolbox, chat, silent)
        for count in (10, 11)
    )
    figures: dict[str, float] = {"sft/dataset": first.digest}
    row = StepRow(
        0, manifest_to_json(StepManifest(0, (), figures=figures)), None, StepState.PLANNED
    )
    refuse_other([row], first)
    with pytest.raises(RunDirectoryError, match=r"not those of step 1: restore sft\.path"):
        refuse_other([row], other)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("sharing", [False, True])
def test_the_loss_of_a_step_is_the_cross_entropy_of_its_imitated_tokens(
    make: Any,
    make_config: Any,
    toolbox: ToolboxTask,
    chat: ChatFormat,
    packing: bool,
    sharing: bool,
) -> None:
    config = make_config()
    batch = load_dataset(config, toolbox, chat, silent).batch(0)
    trainer = {"lr": config.trainer.lr, "packing": packing, "prefix_sharing": sharing}
    model, step = make(
        trainer={**trainer, "microbatch_tokens": 512},
        loss={"type": "reinforce"},
        sdpo={"alpha": 0.0},
        replay={"beta": 0.0},
        generator={"temperature": 1.0},
    )
    total, count = 0.0, sum(sum(one.mask) for one in batch.samples)
    with torch.no_grad():
        for one in batch.samples:
            logprobs = model(torch.tensor([one.ids])).logits[0, :-1].log_softmax(-1)
            own = logprobs.gather(1, torch.tensor(one.ids[1:])[:, None])[:, 0]
            total -= float(own[torch.tensor(one.mask[1:])].sum())
    metrics = step.run(batch, None)
    assert metrics["loss/total"] == metrics["loss/policy"] == pytest.approx(total / count, rel=1e-5)
    assert metrics["tokens/trained"] == count
    assert not any(name.startswith("logprob_mismatch/") for name in metrics)


def test_ids_are_kept_in_few_bytes_and_told_apart_by_the_digest() -> None:
    def of(*ids: int) -> Dataset:
        dataset = Dataset(make_section(), 0)
        dataset.add("row 1", Demonstration(list(ids), [False, *[True] * (len(ids) - 1)]), 10)
        return dataset

    assert of(1, 2).digest == of(1, 2).digest != of(1, 3).digest


def make_section() -> Any:
    from composer_mesh.configs.sft import SftConfig

    return SftConfig(**SFT)
