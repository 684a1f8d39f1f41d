"""Presets are known by name; `check` accepts each on any machine, says what it could not check, and
refuses the same run on hosts that are too small, with the sum.

Which values of a config are ids of a hub, which are paths, and how commits are kept.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from code_rows import ROW
from repository import ROOT
from unit_tests import BuildConfig

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.hub import HubId, id_of
from composer_mesh.configs.load import dump_toml, load_config, resolve_config, table_of
from composer_mesh.configs.paths import pinned_as
from composer_mesh.configs.presets import is_config, names
from composer_mesh.configs.schema import Config
from composer_mesh.planning.memory import GB, total
from composer_mesh.planning.memory_estimate import memory_of
from composer_mesh.planning.model_sizes import parameter_count, sizes_of
from composer_mesh.services.cli import main
from composer_mesh.services.evaluation.target import target_of

pytestmark = pytest.mark.plugins


CONFIGS = ROOT / "configs"


def test_a_preset_is_named_anywhere_and_a_file_of_that_name_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(Path("quickstart")) == load_config(preset("quickstart"))
    Path("quickstart").mkdir()  # such as a run's directory
    assert load_config(Path("quickstart")).data.task == "toolbox"
    Path("quickstart").rmdir()
    Path("quickstart").write_text('[run]\nname = "own"\nsteps = 1\n[data]\ntask = "toolbox"\n')
    assert load_config(Path("quickstart")).run.name == "own"
    assert load_config(preset("quickstart")).run.name == "quickstart"


@pytest.mark.parametrize("path", ["configs/quickstart.toml", "quickstart.toml", "quickstrat"])
def test_a_missing_path_that_resembles_a_preset_names_it(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(tmp_path / path)
    assert "does not exist" in str(refused.value)
    assert "as in `composer-mesh train quickstart`" in str(refused.value)


def test_a_word_for_a_task_is_a_preset_only_where_no_task_has_the_name() -> None:
    assert [is_config(word) for word in ("x.toml", "quickstart", "gsm8k", "toolbox")] == [
        *(True, True, False, False)
    ]
    assert table_of("quickstart", "play")["run"]["name"] == "quickstart"
    assert table_of("toolbox", "play")["data"] == {"task": "toolbox"}
    assert target_of("quickstart", None, []).config.run.name == "quickstart"


def test_every_preset_is_listed_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets"]) == 0
    listed = [line.split("  ", 1) for line in capsys.readouterr().out.splitlines()]
    assert [name.strip() for name, _ in listed] == names()
    assert all(1 < len(about) <= 100 and "=" not in about for _, about in listed)


def test_a_copy_is_the_preset_and_replaces_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["presets", "--copy", "gsm8k"]) == 0
    assert capsys.readouterr().out == "wrote gsm8k.toml: composer-mesh train gsm8k.toml\n"
    assert Path("gsm8k.toml").read_bytes() == preset("gsm8k").read_bytes()
    assert main(["presets", "--copy", "gsm8k"]) == 2
    assert "gsm8k.toml exists: name a new file with --output" in capsys.readouterr().err
    assert main(["presets", "--copy", "gsm8k", "--output", "mine.toml"]) == 0
    assert main(["presets", "--copy", "gsm9k"]) == 2
    assert "'gsm9k' is not a preset: did you mean gsm8k?" in capsys.readouterr().err
    assert main(["presets", "--output", "mine.toml"]) == 2
    assert "needs --copy NAME" in capsys.readouterr().err


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
    helpers = [
        str(ROOT / one) for one in ("tests/plugins/code_tasks/helpers", "tests/unit/helpers")
    ]
    boxes = [
        "environment.sandbox.kind=code_tasks:open_scripted",
        f"run.import_paths={json.dumps(helpers)}",
    ]
    untuned = ["policy.start=base"] if "[sft]" in text else []
    if 'task = "gsm8k"' in text:
        return [f"data.path={problems}", *untuned]
    if 'task = "bfcl_single_call"' in text:  # its rows are those of a package
        return ["data.task=toolbox", *untuned]
    if 'task = "code"' in text:
        return [f"data.path={problems.with_name('tasks.jsonl')}", *boxes]
    return boxes if 'task = "one_liners"' in text else untuned


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


COMMIT, OTHER = "a" * 40, "b" * 40


SMALL = '[run]\nname = "ids"\nsteps = 1\n[data]\ntask = "toolbox"\n'


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("acme/tiny", HubId("acme/tiny")),
        ("acme/tiny@v1.0", HubId("acme/tiny", revision="v1.0")),
        ("acme/tiny@refs/pr/7", HubId("acme/tiny", revision="refs/pr/7")),
        ("acme/Tiny_2.5-GGUF:tiny.Q4_1.gguf", HubId("acme/Tiny_2.5-GGUF", "tiny.Q4_1.gguf")),
        ("openai/gsm8k:main@v1", HubId("openai/gsm8k", "main", "v1")),
    ],
)
def test_an_id_has_an_owner_a_name_a_part_and_a_revision(text: str, named: HubId) -> None:
    assert HubId.parse(text) == named
    assert str(named) == text


NO_IDS = (
    *(
        "tiny",
        "./acme/tiny",
        "../tiny",
        "/acme/tiny",
        "acme/tiny/",
        "acme//tiny",
        "a/b/c",
        "~/tiny",
    ),
    *("acme/tiny@", "@", ":", "acme/tiny:", "acme/@v1", "/", "", "acme/ti ny", "acme/tiny@a:b"),
    *("acme/\u00fcber", "acme/..", "acme/ti..ny", "acme/tiny@v/../../x", "acme/tiny\n", "acme/\0"),
    *("rows/train.jsonl", "rows/a.parquet", "models/tiny.gguf", "a/" + "b" * 300, "acme/tiny@-x"),
)


@pytest.mark.parametrize("text", NO_IDS)
def test_what_looks_like_a_path_is_never_taken_for_an_id(text: str) -> None:
    assert HubId.parse(text) is None


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(SMALL)
    return tmp_path / "run.toml"


def test_a_folder_that_exists_wins_over_an_id(file: Path) -> None:
    assert load_config(file, ["policy.path=acme/tiny"]).policy.path == "acme/tiny"
    (file.parent / "acme" / "tiny").mkdir(parents=True)
    (file.parent / "acme" / "tiny" / "config.json").write_text("{}")
    assert load_config(file, ["policy.path=acme/tiny"]).policy.path == Path("acme/tiny")


def test_a_path_that_is_missing_is_refused_with_both_readings(file: Path) -> None:
    for name, override in (("policy", "tiny"), ("data", "rows/a.jsonl"), ("policy", "./acme/tiny")):
        with pytest.raises(
            ConfigError, match=r"correct the path.*|or the id of one on the hub"
        ) as e:
            load_config(file, ["data.task=a:B", f"{name}.path={override}"])
        assert "or the id of one on the hub, as ORG/NAME" in str(e.value)


def test_a_part_of_a_model_that_is_no_gguf_file_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="names 'main' of a model, which is not a GGUF file"):
        load_config(file, ["policy.path=acme/tiny:main"])


def test_a_value_that_is_no_text_is_refused_as_a_path(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy.path = 3: must be the path of a file or folder"):
        load_config(file, ["policy.path=3"])


def test_a_written_config_is_read_with_the_same_paths_and_ids(file: Path) -> None:
    sizes = (
        'policy.sizes={model_type="llama", hidden_size=8, intermediate_size=8, vocab_size=300,'
        "num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1}"
    )
    for text, path in (("./acme/tiny", Path("acme/tiny")), (f"acme/tiny@{COMMIT}",) * 2):
        config = load_config(file, [f"policy.path={text}", sizes], model_later=True)
        again = resolve_config(tomllib.loads(dump_toml(config)), [], "again", model_later=True)
        assert config.policy.path == again.policy.path == path


def pinned(build_config: BuildConfig, path: str, before: str) -> str:
    def with_path(path: str) -> Config:
        return build_config(policy={"path": path}, data={"task": "a:B", "path": path})

    found = pinned_as(with_path(path), with_path(before))
    assert found.policy.path == found.data.path
    return str(found.policy.path)


def test_a_resumed_run_keeps_the_recorded_commit(build_config: BuildConfig) -> None:
    recorded = f"acme/tiny@{COMMIT}"
    assert pinned(build_config, "acme/tiny", recorded) == recorded
    assert pinned(build_config, "acme/tiny@main", recorded) == recorded


def test_another_id_or_a_named_revision_is_not_replaced(build_config: BuildConfig) -> None:
    for path in ("acme/other", "acme/tiny@v2", f"acme/tiny@{OTHER}"):
        assert pinned(build_config, path, f"acme/tiny@{COMMIT}") == path


def test_only_an_id_is_pinned(build_config: BuildConfig) -> None:
    config = build_config()
    assert pinned_as(config, build_config(policy={"path": "acme/tiny"})) is config
    assert id_of(Path("acme/tiny")) is None
