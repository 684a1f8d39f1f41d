"""A broken model folder is refused by one error that names the file and the repair."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from repetition import LONG
from safetensors.numpy import load_file, save_file

from composer_mesh.actors.models.policy import save_policy
from composer_mesh.planning.model_folder import UnfitModelFolder, check_model_folder
from composer_mesh.services.cli import main

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tokenizer: Any, build_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "whole"
    save_policy(build_model(1), tokenizer, folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "policy"))


def changed(name: str, **values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        table = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**table, **values}))

    return change


def written(name: str, content: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(content)

    return write


def gone(*names: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return remove


def fifo(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


def linked(name: str, to: str) -> Callable[[Path], None]:
    def link(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(to)

    return link


def cut(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-10])


def cut_index(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_bytes(b"{")


def replaced_by_a_folder(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").mkdir()


def header(content: bytes, length: int | None = None, rest: bytes = b"") -> Callable[[Path], None]:
    told = struct.pack("<Q", len(content) if length is None else length)
    return written(WEIGHTS, told + content + rest)


def tensors(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file(found, folder / WEIGHTS)

    return write


def indexed(**weight_map: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        names = dict.fromkeys(load_file(folder / WEIGHTS), "one.safetensors")
        (folder / WEIGHTS).rename(folder / "one.safetensors")
        told = {"metadata": {}, "weight_map": {**names, **weight_map}}
        (folder / INDEX).write_text(json.dumps(told))

    return write


NORM = "model.norm.weight"
NOT_WHOLE = r"model.safetensors is not a whole safetensors file \("
BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "config.json that is cut": (
        written("config.json", b'{"model_type"'),
        "config.json is not JSON",
    ),
    "config.json of bytes": (written("config.json", b"\xff\xfe\x00"), "config.json is not JSON"),
    "config.json that is nested": (written("config.json", b"[" * 100_000), "is not JSON"),
    "config.json that is a list": (written("config.json", b"[]"), "holds a list and not a JSON"),
    "config.json that is empty": (written("config.json", b"{}"), "config.json has no model_type"),
    "negative layers": (changed("config.json", num_hidden_layers=-1), "num_hidden_layers = -1"),
    "layers that are text": (
        changed("config.json", num_hidden_layers="x"),
        "num_hidden_layers = x",
    ),
    "a huge vocabulary": (changed("config.json", vocab_size=10**30), "vocab_size = 10000"),
    "quantized": (changed("config.json", quantization_config={}), "in its full precision"),
    "no weights": (gone(WEIGHTS), "model.safetensors is missing: .* with weights as safetensors"),
    "weights that are cut": (cut, NOT_WHOLE),
    "weights that are empty": (written(WEIGHTS, b""), "model.safetensors "),
    "a huge header": (header(b"{}", 1 << 60), NOT_WHOLE),
    "a header of bytes": (header(b"\xff" * 20), NOT_WHOLE),
    "a header that is a list": (header(b"[]"), NOT_WHOLE),
    "a tensor that is text": (header(b'{"a": "b"}'), NOT_WHOLE),
    "a tensor of many dimensions": (
        header(json.dumps({"a": {"dtype": "F32", "shape": [2**62] * 9999}}).encode()),
        NOT_WHOLE,
    ),
    "a tensor without its bytes": (
        header(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', rest=bytes(4)),
        NOT_WHOLE,
    ),
    "tensors with gaps": (
        header(
            b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, '
            b'"b": {"dtype": "U8", "shape": [1], "data_offsets": [2, 3]}}',
            rest=bytes(3),
        ),
        NOT_WHOLE,
    ),
    "a missing weight": (tensors(lambda found: found.pop(NORM)), "norm.weight is missing"),
    "a wrong shape": (
        tensors(lambda found: found.update({NORM: found[NORM][:5]})),
        r"norm.weight is \[5\] but \[32\]",
    ),
    "an index of a missing file": (indexed(more="two.safetensors"), "two.safetensors is missing"),
    "an index of a missing tensor": (indexed(more="one.safetensors"), "has no more, which model"),
    "an index of other folders": (indexed(more="../../etc/passwd"), "is not a file next to it"),
    "an index of numbers": (indexed(more=7), "is not a file next to it"),
    "an index that is cut": (cut_index, "index.json is not JSON"),
    "no tokenizer": (gone("tokenizer.json"), "has no tokenizer: none of tokenizer.json"),
    "a tokenizer that is cut": (written("tokenizer.json", b"{"), "tokenizer.json is not JSON"),
    "no chat template": (
        gone("chat_template.jinja"),
        "has no chat template: use an instruction-tuned model",
    ),
    "a chat template of bytes": (written("chat_template.jinja", b"\xff"), "is not UTF-8"),
    "a FIFO": (fifo("config.json"), "config.json is neither a file nor a folder"),
    "a FIFO that nothing names": (fifo("added_tokens.json"), "added_tokens.json is neither"),
    "a device": (linked(WEIGHTS, "/dev/zero"), "model.safetensors is neither a file"),
    "a link to itself": (linked(WEIGHTS, WEIGHTS), "model.safetensors is neither a file"),
    "a folder for a file": (replaced_by_a_folder, "Is a directory"),
}


def test_a_whole_folder_is_accepted_also_by_an_index(folder: Path) -> None:
    check_model_folder(folder)
    indexed()(folder)
    check_model_folder(folder)


def test_a_quantization_that_is_null_is_none(folder: Path) -> None:
    changed("config.json", quantization_config=None)(folder)
    check_model_folder(folder)


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_experts": None, "num_local_experts": None},  # as dense models of Gemma 4
        {"num_experts": 0},
        {"intermediate_size": [48, 48]},  # as Gemma 3n
        {"num_key_value_heads": None},
    ],
)
def test_counts_may_be_none_where_a_model_has_none_and_a_list_for_its_layers(
    folder: Path, sizes: dict[str, Any]
) -> None:
    changed("config.json", **sizes)(folder)
    check_model_folder(folder)


@pytest.mark.parametrize("by_index", [False, True])
def test_weights_like_nan_are_refused_with_the_tensor(folder: Path, by_index: bool) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = sorted(tensors)[-1]
    tensors[name] = tensors[name].copy()
    tensors[name].reshape(-1)[-1] = float("nan")
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    if by_index:
        indexed()(folder)
    with pytest.raises(UnfitModelFolder, match=rf"values like NaN in '{name}': give a checkpoint"):
        check_model_folder(folder)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused_with_the_file_and_the_repair(folder: Path, case: str) -> None:
    breaking, told = BROKEN[case]
    breaking(folder)
    with pytest.raises(UnfitModelFolder, match=told) as refused:
        check_model_folder(folder)
    assert str(refused.value).startswith(f"policy.path: {folder}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("command", ["check", "train"])
def test_check_and_train_refuse_a_broken_folder_before_anything_starts(
    folder: Path, command: str, capsys: Any, tmp_path: Path
) -> None:
    cut(folder)
    output = [] if command == "check" else ["--output", str(tmp_path / "run")]
    settings = ["--set", f"policy.path={folder}"]
    assert main([command, "configs/quickstart.toml", *settings, *output]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"composer-mesh: policy.path: {folder / WEIGHTS} is not ")
    assert len(told.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@LONG
def test_check_prints_where_the_tools_are(folder: Path, capsys: Any) -> None:
    written = "hermes calls by the template, results by the template"
    for place in ("template", "system"):
        settings = [f"policy.path={folder}", "replay.beta=0", f"policy.tools_in={place}"]
        words = [word for one in settings for word in ("--set", one)]
        assert main(["check", "configs/quickstart.toml", *words]) == 0
        told = capsys.readouterr().out.splitlines()
        assert f'policy: tools_in = "{place}", {written}' in told


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su"])
@pytest.mark.parametrize(
    "place",
    [
        lambda rope: {"rope_scaling": rope},
        lambda rope: {"rope_scaling": {"type": rope["rope_type"], "factor": 4.0}},
        lambda rope: {"rope_parameters": {"full_attention": rope}},
        lambda rope: {"text_config": {"rope_parameters": rope}},
    ],
)
def test_rotary_positions_that_depend_on_batch_neighbours_are_refused(
    folder: Path, kind: str, place: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    changed("config.json", **place({"rope_type": kind, "factor": 4.0}))(folder)
    with pytest.raises(UnfitModelFolder, match=f"of type {kind}, whose log-prob") as refused:
        check_model_folder(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_rotary_positions_that_no_neighbour_changes_are_accepted(folder: Path, kind: str) -> None:
    changed("config.json", rope_parameters={"rope_type": kind, "factor": 4.0})(folder)
    check_model_folder(folder)


@pytest.mark.parametrize(
    ("break_it", "told"),
    [
        (changed("config.json", transformers_weights="../x"), "has transformers_weights, by which"),
        (changed("config.json", num_hidden_layers=10**6), "has 1000000 layers but its files hold"),
        (written("adapter_config.json", b"{}"), "adapters onto another model: merge the adapters"),
    ],
)
def test_a_folder_that_would_load_or_build_something_else_is_refused(
    break_it: Callable[[Path], None], told: str, folder: Path
) -> None:
    break_it(folder)
    with pytest.raises(UnfitModelFolder, match=told):
        check_model_folder(folder)


def test_the_line_of_a_refusal_holds_no_control_characters() -> None:
    assert str(UnfitModelFolder("a\x1b[31m", "b\nc")).isprintable()
