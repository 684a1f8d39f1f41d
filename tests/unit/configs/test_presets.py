"""`check` accepts each shipped preset on any machine, says what it could not check, and refuses
the same run on hosts that are too small, with the sum."""

import json
from pathlib import Path

import pytest
from code_rows import ROW
from repository import ROOT

from composer_mesh.configs.load import load_config
from composer_mesh.planning.memory import GB, total
from composer_mesh.planning.memory_estimate import memory_of
from composer_mesh.planning.model_sizes import parameter_count, sizes_of
from composer_mesh.services.cli import main

pytestmark = pytest.mark.plugins

CONFIGS = ROOT / "configs"
REAL = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-8b": 8_190_735_360,
    "qwen3-8b-64k": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-coder": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    **dict.fromkeys(
        ["smollm2-bfcl", "smollm2-bfcl-teacher", "smollm2-gsm8k", "smollm2-tool-chains"],
        134_515_008,
    ),
}


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """A file of GSM8K's form with more rows than are held out, and one of coding tasks beside."""
    path = tmp_path / "problems.jsonl"
    rows = [f'{{"question": "{n}+1?", "answer": "#### {n + 1}"}}\n' for n in range(20)]
    path.write_text("".join(rows))
    splits = {"double": "train", "again": "heldout"}
    tasks = [{**ROW, "name": one, "prompt": one, "split": splits[one]} for one in splits]
    path.with_name("tasks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in tasks))
    return path


def checked(name: str, problems: Path, *overrides: str) -> int:
    given = [part for one in [*own(name, problems), *overrides] for part in ("--set", one)]
    return main(["check", str(preset(name)), *given])


def own(name: str, problems: Path) -> list[str]:
    """What a preset is given: data of its task, and boxes that run nothing."""
    text = preset(name).read_text()
    boxes = "environment.sandbox.kind=code_tasks:open_scripted"
    untuned = ["policy.start=base"] if "[sft]" in text else []
    if 'task = "gsm8k"' in text:
        return [f"data.path={problems}", *untuned]
    if 'task = "bfcl_single_call"' in text:  # its rows are those of a package
        return ["data.task=toolbox", *untuned]
    if 'task = "code"' in text:
        return [f"data.path={problems.with_name('tasks.jsonl')}", boxes]
    return [boxes] if 'task = "one_liners"' in text else untuned


def preset(name: str) -> Path:
    return CONFIGS / f"{name}.toml"


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.toml")))
def test_check_accepts_every_preset(
    name: str, problems: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(name, problems) == 0
    shown = capsys.readouterr().out
    assert "placement (memory in GB: estimated / available)" in shown
    assert ("is not there: its sizes are policy.sizes" in shown) == (name in REAL)


@pytest.mark.parametrize(("name", "parameters"), REAL.items())
def test_a_preset_declares_the_sizes_of_the_model_that_it_names(
    name: str, parameters: int, problems: Path
) -> None:
    config = load_config(preset(name), own(name, problems), model_later=True)
    assert parameter_count(sizes_of(config.policy)) == parameters


@pytest.mark.parametrize("name", REAL)
def test_a_preset_is_not_trained_without_its_model(
    name: str, problems: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [part for one in own(name, problems) for part in ("--set", one)]
    assert main(["train", str(preset(name)), *given]) == 2
    assert "must be a model folder that holds config.json" in capsys.readouterr().err


SMALLER = {
    "qwen2.5-0.5b": (
        "gpu_memory_gb=8",
        "master weights 1.84 + gradients 1.84 + optimizer state 3.68",
    ),
    "qwen3-8b": ("gpu_memory_gb=40", "master weights 7.63 + gradients 7.63 + optimizer state 15.3"),
    "qwen3-8b-64k": ("gpu_memory_gb=60", "gathered for compute 6.07 + activations 29.2"),
    "qwen3-32b": ("gpus=6", "all GPUs: trainer 16 x 1 + generator 4 x 4 = 32, of 24"),
    "qwen3-coder": ("memory_gb=100", "environment 4 x 16.09"),
    "gpt-oss-20b": ("gpu_memory_gb=40", "gathered for compute 10.4 + activations 11.7"),
}


@pytest.mark.parametrize("name", SMALLER)
def test_the_same_run_on_smaller_hosts_is_refused_with_the_sum(
    name: str, problems: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, expected = SMALLER[name]
    assert checked(name, problems, f"placement.hosts.0.{change}") == 2
    refused = capsys.readouterr()
    assert expected in refused.err
    assert "fits on no host" in refused.err
    assert refused.out == ""


def test_an_engine_that_takes_a_part_of_a_gpu_must_fit_into_that_part(
    problems: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked("qwen2.5-0.5b", problems, "generator.vllm.gpu_memory_utilization=0.2") == 2
    assert "generator-0 fits on no host" in (refused := capsys.readouterr().err)
    assert "may use 0.07 x 23.5 = 1.64 GB each" in refused


def test_the_8b_preset_leaves_no_gpu_idle_and_gives_none_twice(
    problems: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked("qwen3-8b", problems) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if " node " in line]
    gpus = [row[4] for row in rows if row[0].startswith(("trainer", "generator", "sdpo"))]
    assert sorted(gpus) == [str(number) for number in range(8)]


@pytest.mark.parametrize(
    ("name", "by_hand"),
    [("qwen3-8b-64k", 75.4), ("qwen3-32b", 73.5), ("qwen3-coder", 65.9), ("gpt-oss-20b", 46.9)],
)
def test_long_contexts_fit_by_the_sums_that_the_guide_makes_by_hand(
    name: str, by_hand: float, problems: Path
) -> None:
    config = load_config(preset(name), own(name, problems), model_later=True)
    needs = total(memory_of("trainer", config, sizes_of(config.policy)).gpu) / GB
    assert needs == pytest.approx(by_hand, rel=0.1)
    assert f"{by_hand} |" in (ROOT / "docs" / "placement.md").read_text(encoding="utf-8")
    (host,) = config.placement.hosts
    assert needs < host.gpu_memory_gb


@pytest.mark.parametrize(
    ("name", "changes", "by_hand"),
    [
        ("qwen3-8b-64k", ["context_parallel=4", "packing=true"], 48.0),
        ("qwen3-coder", ["expert_parallel=16"], 64.1),
        ("qwen3-coder", ["expert_parallel=16", "context_parallel=4", "packing=true"], 41.1),
    ],
)
def test_divided_positions_and_experts_take_what_the_guide_sums_by_hand(
    name: str, changes: list[str], by_hand: float, problems: Path
) -> None:
    overrides = [*own(name, problems), *(f"trainer.{one}" for one in changes)]
    config = load_config(preset(name), overrides, model_later=True)
    needs = total(memory_of("trainer", config, sizes_of(config.policy)).gpu) / GB
    assert needs == pytest.approx(by_hand, rel=0.1)
    assert f"{by_hand} |" in (ROOT / "docs" / "placement.md").read_text(encoding="utf-8")


def test_the_32b_preset_leaves_no_gpu_idle(
    problems: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked("qwen3-32b", problems) == 0
    rows = [one.split() for one in capsys.readouterr().out.splitlines() if one.startswith(" all ")]
    assert len(rows) == 4
    assert all("8" in row for row in rows)
