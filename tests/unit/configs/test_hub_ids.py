"""Which values of a config are ids of a hub, which are paths, and how commits are kept."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from unit_tests import BuildConfig

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.hub import HubId, id_of
from composer_mesh.configs.load import dump_toml, load_config, resolve_config
from composer_mesh.configs.paths import pinned_as
from composer_mesh.configs.schema import Config

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
    with pytest.raises(ConfigError, match="names 'main' of a model, which is no GGUF file"):
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
