"""A GGUF file becomes a model folder in float32, or is refused by one error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from composer_mesh.actors.models.gguf_program import FAILURES, convert
from composer_mesh.configs.errors import ConfigError
from composer_mesh.planning.model_folder import check_model_folder
from composer_mesh.services.checks.hub import converted, dequantization

WIDTH, HEADS, INNER = 64, 4, 128
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def written(file: Path, tokenizer: Any, kind: str = "llama") -> dict[str, np.ndarray]:
    """Write a tiny model with tied embeddings; return its weights by their names in GGUF."""
    table = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    writer = gguf.GGUFWriter(file, kind)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges([" ".join(one) for one in table["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    shapes = {"token_embd": (len(tokens), WIDTH), "output_norm": (WIDTH,)}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        shapes[f"blk.0.{name}"] = (WIDTH, WIDTH)
    for name in ("ffn_gate", "ffn_up"):
        shapes[f"blk.0.{name}"] = (INNER, WIDTH)
    shapes |= {"blk.0.ffn_down": (WIDTH, INNER)}
    shapes |= {f"blk.0.{name}": (WIDTH,) for name in ("attn_norm", "ffn_norm")}
    rng, weights = np.random.default_rng(0), {}
    for name, shape in shapes.items():
        weights[name] = rng.normal(size=shape).astype(np.float32)
        values, quantized = weights[name], len(shape) == 2
        if quantized:
            values = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            weights[name] = gguf.dequantize(values, gguf.GGMLQuantizationType.Q8_0)
        kind_of = gguf.GGMLQuantizationType.Q8_0 if quantized else None
        writer.add_tensor(f"{name}.weight", values, raw_dtype=kind_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def test_a_file_becomes_a_folder_of_dequantized_float32_weights(
    tokenizer: Any, tmp_path: Path
) -> None:
    weights = written(tmp_path / "tiny.Q8_0.gguf", tokenizer)
    convert(tmp_path / "tiny.Q8_0.gguf", tmp_path / "model")
    check_model_folder(tmp_path / "model")
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert {one.dtype for one in found.values()} == {np.dtype("float32")}
    for name, own in (
        ("model.embed_tokens", "token_embd"),
        ("model.layers.0.mlp.down_proj", "blk.0.ffn_down"),
        ("model.layers.0.self_attn.v_proj", "blk.0.attn_v"),
        ("model.norm", "output_norm"),
    ):
        np.testing.assert_array_equal(found[f"{name}.weight"], weights[own])
    assert "lm_head.weight" not in found, "tied weights stay tied"
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["tie_word_embeddings"]
    assert "quantization_config" not in config
    assert str(tmp_path) not in json.dumps(config)
    assert (tmp_path / "model" / "chat_template.jinja").read_text() == TEMPLATE
    assert dequantization(tmp_path / "model") == (
        "float32 weights of tiny.Q8_0.gguf, dequantized from Q8_0, F32: not those of the original "
        "model"
    )


def test_a_file_is_converted_once_for_its_content(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    written(file, tokenizer)
    folder = converted(file, tmp_path / "cache", "policy.path")
    made = (folder / "config.json").stat()
    again = file.rename(tmp_path / "renamed.gguf")
    assert converted(again, tmp_path / "cache", "policy.path") == folder
    assert (folder / "config.json").stat() == made
    assert [one.name for one in (tmp_path / "cache").iterdir()] == [folder.name]


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 100])
def test_a_file_that_cannot_be_read_is_one_of_the_failures(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(content)
    with pytest.raises(FAILURES):
        convert(tmp_path / "broken.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_failure_is_one_error_with_what_transformers_does_not_read(
    tokenizer: Any, tmp_path: Path
) -> None:
    written(tmp_path / "odd.gguf", tokenizer, "oddity")
    told = r"policy.path = .*: transformers cannot read it .*oddity"
    with pytest.raises(ConfigError, match=told):
        converted(tmp_path / "odd.gguf", tmp_path / "cache", "policy.path")
    assert not list((tmp_path / "cache").iterdir())
