"""Models and datasets by their ids, with huggingface_hub's own client against a hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import PATIENT, TOKEN, Files, Hub, served

from composer_mesh.actors.checkpoints.manifest import write_manifest, written

STEPS = Path(__file__).parent / "helpers" / "hub_steps.py"
CONFIG = """\
[run]
name = "hub"
steps = 1
[data]
task = "gsm8k"
path = "acme/sums:main"
[policy]
path = "acme/tiny"
max_context = 256
[generator]
max_new_tokens = 16
[schedule]
prompts_per_step = 2
group_size = 2
[eval]
episodes = 2
[sdpo]
alpha = 0
[replay]
beta = 0
"""
WEIGHTS = "model.safetensors"
CARD = """\
---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train.jsonl
  - split: test
    path: main/test.jsonl
---
"""


def lines(first: int, last: int) -> bytes:
    """Rows as GSM8K has them."""
    rows = [
        {"question": f"What is {n}+1?", "answer": f"<<{n}+1={n + 1}>> #### {n + 1}"}
        for n in range(first, last)
    ]
    return "\n".join(map(json.dumps, rows)).encode()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The files of a tiny model."""
    return files_of(tmp_path_factory.mktemp("tiny") / "model", intermediate_size=64)


def files_of(folder: Path, **sizes: int) -> Files:
    """The files of a small model."""
    from composer_mesh.actors.models.policy import build_model, build_tokenizer, save_policy
    from composer_mesh.configs.policy import PolicyConfig

    sizes = {"hidden_size": 32, "head_dim": 16, "vocab_size": 400, **sizes}
    tokenizer = build_tokenizer(["What is 1+1? Answer: 2 system user assistant tool"] * 50, 400)
    save_policy(build_model(PolicyConfig(**sizes), tokenizer, 1), tokenizer, folder)
    return {one.name: one.read_bytes() for one in folder.iterdir()}


@pytest.fixture
def hub(model: Files) -> Iterator[Hub]:
    """A hub with the model and a dataset; its model has files that no run needs."""
    with served() as hub:
        more = {"pytorch_model.bin": b"no", "modeling_tiny.py": b"no", "onnx/" + WEIGHTS: b"no"}
        hub.repository("acme/tiny").commit({**model, **more, "README.md": b"tiny"})
        rows = {"main/train.jsonl": lines(0, 30), "main/test.jsonl": lines(30, 40)}
        hub.repository("acme/sums", "datasets").commit({"README.md": CARD.encode(), **rows})
        yield hub


class Client:
    """Children with a cache of their own."""

    def __init__(self, hub: Hub, folder: Path) -> None:
        self.config = folder / "run.toml"
        self.config.write_text(CONFIG)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(folder / "home"),
            "HF_HUB_DISABLE_XET": "1",
            **PATIENT,
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def does(self, *steps: dict[str, Any], **environment: str) -> list[dict[str, Any]]:
        """Do steps in one process; return what each gave."""
        done = subprocess.run(
            [sys.executable, str(STEPS), str(self.config)],
            input="\n".join(map(json.dumps, steps)),
            env={**self.environment, **environment},
            cwd=self.config.parent,
            capture_output=True,
            text=True,
            check=False,
        )
        assert TOKEN not in done.stdout + done.stderr
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def client(hub: Hub, tmp_path: Path) -> Client:
    return Client(hub, tmp_path)


def policy(name: str, **more: Any) -> dict[str, Any]:
    """A step with a policy."""
    return {"set": [f"policy.path={name}"], **more}


def test_check_reads_no_weights_and_a_run_gets_the_same_commit(hub: Hub, client: Client) -> None:
    commit = hub.repository("acme/tiny").revisions["main"]
    rows = hub.repository("acme/sums", "datasets").revisions["main"]
    (found,) = client.does(policy("acme/tiny", remarks=True))
    assert found["policy"] == f"acme/tiny@{commit}"
    assert found["data"] == f"acme/sums:main@{rows}"
    assert "of weights are downloaded when a run starts" in found["remarks"][0]
    assert "30 rows of train, 10 rows of test" in found["remarks"][1]
    assert not hub.asked_for("safetensors")
    hub.repository("acme/tiny").commit({"config.json": b"{}"})
    (again,) = client.does(policy(found["policy"], download=True))
    assert again["policy"] == found["policy"]
    assert WEIGHTS in again["files"]
    assert {Path(name).suffix for name in again["files"]} == {".json", ".jinja", ".safetensors"}
    asked = [one for one in hub.asked_for("acme/tiny/resolve") if not one.startswith("HEAD")]
    assert sorted({Path(one).suffix for one in asked}) == [".jinja", ".json", ".safetensors"]
    assert not [one for one in asked if "onnx" in one]


@pytest.mark.timeout(1800)  # two whole runs
def test_a_run_is_resumed_with_its_commit_where_main_has_moved_and_the_cache_is_empty(
    hub: Hub, client: Client, model: Files, tmp_path: Path
) -> None:
    train = [sys.executable, "-m", "composer_mesh", "train", str(client.config), "--output", "run"]

    def trained(*words: str, **environment: str) -> str:
        done = subprocess.run(
            [*train, *words],
            env={**client.environment, **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stderr

    commit = hub.repository("acme/tiny").revisions["main"]
    assert f"composer-mesh: policy.path is acme/tiny@{commit}" in trained()
    moved = hub.repository("acme/tiny").commit({**model, "generation_config.json": b"{}"})
    rows = hub.repository("acme/sums", "datasets")
    rows.commit({**rows.commits[rows.revisions["main"]], "main/test.jsonl": lines(50, 60)})
    hub.requests.clear()
    trained("--resume", "--set", "run.steps=2", HF_HOME=str(tmp_path / "elsewhere"))
    config = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert config["policy"]["path"] == f"acme/tiny@{commit}"
    assert hub.asked_for(f"resolve/{commit}/{WEIGHTS}")
    assert not hub.asked_for(moved) + hub.asked_for(rows.revisions["main"])
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: Hub, client: Client, model: Files) -> None:
    tiny = hub.repository("acme/tiny")
    other = {**model, "generation_config.json": b'{"do_sample": true}'}
    commit = tiny.commit(other, "v2")
    named, pinned, unknown = client.does(
        policy("acme/tiny@v2"), policy(f"acme/tiny@{commit}"), policy("acme/tiny@v3")
    )
    assert named["policy"] == pinned["policy"] == f"acme/tiny@{commit}"
    assert "it has no revision 'v3': correct what follows the @" in unknown["error"]


def test_a_download_that_was_cut_is_continued(hub: Hub, client: Client, tmp_path: Path) -> None:
    files = files_of(tmp_path / "large", intermediate_size=2**16)  # huggingface_hub keeps 10 MB
    hub.repository("acme/large").commit(files)
    hub.cut.add(WEIGHTS)
    (found,) = client.does(policy("acme/large", download=True))
    assert (Path(found["folder"]) / WEIGHTS).read_bytes() == files[WEIGHTS]
    first, second = (one for one in hub.asked_for(WEIGHTS) if one.startswith("GET"))
    assert int(second.partition(f"{first} bytes=")[2].partition("-")[0]) >= 10_000_000


def test_a_private_model_needs_the_token_and_a_gated_one_its_terms(
    hub: Hub, client: Client, model: Files
) -> None:
    hub.repository("acme/hidden").commit(model)
    hub.repository("acme/hidden").private = True
    hub.repository("acme/gated").commit(model)
    hub.repository("acme/gated").gated = True
    steps = [policy(name) for name in ("acme/hidden", "acme/gated", "acme/none")]
    hidden, gated, none = client.does(*steps)
    for refused in (hidden, none):
        assert "neither such a path in the working directory, nor a model of" in refused["error"]
        assert f"{hub.url} that a request without a token may read" in refused["error"]
        assert "set HF_TOKEN for a private one" in refused["error"]
    assert f"accept its terms at {hub.url}/acme/gated, and set HF_TOKEN" in gated["error"]
    hidden, gated, none = client.does(*steps, HF_TOKEN=TOKEN)
    assert hidden["policy"].startswith("acme/hidden@")
    assert gated["policy"].startswith("acme/gated@")
    assert "that the token of this account may read" in none["error"]


def test_offline_the_cache_is_used_and_what_it_lacks_is_named(hub: Hub, client: Client) -> None:
    (first,) = client.does(policy("acme/tiny", download=True, remarks=True))
    asked = len(hub.requests)
    cached, missing, rows = client.does(
        policy("acme/tiny", download=True),
        policy("acme/other"),
        {"rows": first["data"]},
        HF_HUB_OFFLINE="1",
    )
    assert len(hub.requests) == asked
    assert cached["policy"] == first["policy"]
    assert len(rows["rows"]) == 40
    assert "while HF_HUB_OFFLINE is set: unset it once to download them" in missing["error"]


def test_a_hub_that_cannot_be_reached_is_one_error_with_both_readings(
    hub: Hub, client: Client
) -> None:
    (found,) = client.does(policy("acme/tiny"), HF_ENDPOINT="http://127.0.0.1:1")
    assert (
        "there is no such path in the working directory, and http://127.0.0.1:1 gave no"
        in (found["error"])
    )


def test_a_repository_without_safetensors_is_refused_before_a_download(
    hub: Hub, client: Client, model: Files
) -> None:
    rest = {name: content for name, content in model.items() if name != WEIGHTS}
    hub.repository("acme/pickles").commit({**rest, "pytorch_model.bin": b"no"})
    hub.repository("acme/gguf").commit({**rest, "tiny.Q4_1.gguf": b"no"})
    hub.repository("acme/bare").commit({WEIGHTS: model[WEIGHTS], "config.json": b"{}"})
    names = ("acme/pickles", "acme/gguf", "acme/bare")
    pickles, gguf, bare = client.does(*(policy(name, download=True) for name in names))
    assert "only pytorch_model.bin, and pickles are never loaded" in pickles["error"]
    assert "has GGUF files alone: write acme/gguf:tiny.Q4_1.gguf" in gguf["error"]
    assert "has no model_type" in bare["error"]
    assert not hub.asked_for("pytorch_model.bin") + hub.asked_for("resolve/main/tiny")


def test_names_of_files_cannot_leave_the_cache(
    hub: Hub, client: Client, model: Files, tmp_path: Path
) -> None:
    hostile = {"../../evil.json": b"{}", f"{tmp_path}/evil.json": b"{}", "a/../evil.json": b"{}"}
    hub.repository("acme/hostile").commit({**model, **hostile})
    (found,) = client.does(policy("acme/hostile", download=True))
    assert found["policy"].startswith("acme/hostile@")
    assert not list(tmp_path.rglob("*evil*"))


@pytest.fixture
def run(model: Files, tmp_path: Path) -> Path:
    """The directory of a run with two checkpoints, of which the newer has no exported model."""
    run, folder = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-2"
    folder.mkdir(parents=True)
    for name, content in model.items():
        (folder / name).write_bytes(content)
    config = json.loads(model["config.json"]) | {"_name_or_path": str(tmp_path)}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "training.json").write_text("{}")
    write_manifest(folder, 2, written(folder, list(folder.iterdir())))
    (run / "checkpoints" / "step-3").mkdir()
    write_manifest(run / "checkpoints" / "step-3", 3, [])
    (run / "config.toml").write_text(CONFIG.replace("acme/tiny", f"acme/tiny@{'a' * 40}"))
    (run / "evaluations.jsonl").write_text(
        '{"step": 0, "success": 0.25, "episodes": 40}\n'
        '{"step": 2, "success": 0.5, "episodes": 40}\n'
    )
    return run


@pytest.mark.plugins
def test_a_pushed_checkpoint_is_loaded_by_its_id(hub: Hub, client: Client, run: Path) -> None:
    dry, done, read, branch = client.does(
        {"push": [str(run), "acme/sums-tiny", "--dry"]},
        {"push": [str(run), "acme/sums-tiny", "--private", "--checkpoint", "2"]},
        {"read": "acme/sums-tiny"},
        {"push": [str(run), "acme/sums-tiny", "--revision", "step-2"]},
        HF_TOKEN=TOKEN,
    )
    assert done["status"] == 0, done["err"]
    assert branch["status"] == 0, branch["err"]
    repository = hub.repository("acme/sums-tiny")
    assert set(repository.revisions) == {"main", "step-2"}
    files = repository.commits[repository.revisions["main"]]
    assert "training.json" not in files
    assert "manifest.json" not in files
    assert not [name for name, content in files.items() if str(run.parent).encode() in content]
    card = files["README.md"].decode()
    assert dry["out"].startswith(card)
    assert "from `acme/tiny` at commit `aaaa" in card
    assert "| step 0 | 25.0% |" in card
    assert "| step 2 | 50.0% |" in card
    assert read["text"].count("hello") == 1
    assert not list(run.glob(".push-*"))


@pytest.mark.plugins
def test_a_push_that_is_refused_says_what_to_do(hub: Hub, client: Client, run: Path) -> None:
    (run.parent / "empty").mkdir()
    token, empty, step, name = client.does(
        {"push": [str(run), "acme/up"]},
        {"push": [str(run.parent / "empty"), "acme/up"]},
        {"push": [str(run), "acme/up", "--checkpoint", "3"]},
        {"push": [str(run), "acme/up@v1"]},
    )
    assert "set HF_TOKEN to a token that may write there" in token["err"]
    assert "has no exported checkpoint" in empty["err"]
    assert "--checkpoint is 3 but" in step["err"]
    assert "has those of the steps 2" in step["err"]
    assert "is not an id of a repository" in name["err"]
    assert ("models", "acme/up") not in hub.repositories


def test_rows_of_a_dataset_have_its_splits(hub: Hub, client: Client) -> None:
    hub.repository("acme/one", "datasets").commit({"train.jsonl": lines(0, 5)})
    both, one, unknown, none = client.does(
        *({"rows": name} for name in ("acme/sums:main", "acme/one", "acme/sums:other", "acme/no"))
    )
    splits = [row["split"] for row in both["rows"]]
    assert splits == ["train"] * 30 + ["test"] * 10
    assert len(one["rows"]) == 5
    assert "split" not in one["rows"][0]
    assert "acme/sums:other cannot be loaded" in unknown["error"]
    assert "acme/no cannot be loaded" in none["error"]
