"""Sizes of a decoder model and the parameter counts that follow from them.

Sizes come from the built-in model's section, from a Hugging Face config.json, or from a config that
declares them before the model's folder exists. Only the decoders in `KNOWN` are supported.

The names and shapes of a decoder's weights, in the names of Hugging Face without `model.`.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.policy import Decoder, ModelSizes, PolicyConfig
from composer_mesh.configs.sdpo import TeacherModelConfig
from composer_mesh.configs.validation import first_error, validated
from composer_mesh.configs.worded import Worded

KNOWN: tuple[str, ...] = get_args(Decoder)


class UnknownSizes(Worded, Exception):
    """The parameters of a model cannot be counted: its location, and the reason."""

    message = "{0}: {1}"


def sizes_of(policy: PolicyConfig) -> ModelSizes:
    """Return the policy's sizes; raises `UnknownSizes` if they are unknown.

    The sizes in an existing folder must equal those that the config declares.
    """
    if policy.folder is None:
        return _built_in(policy)
    return _sizes_in(policy.folder, policy.sizes, "policy")


def teacher_sizes_of(teacher: TeacherModelConfig) -> ModelSizes:
    """Return the sizes of an SDPO teacher that is another model, as `sizes_of` does."""
    return _sizes_in(teacher.folder, teacher.sizes, "sdpo.teacher_model")


def _sizes_in(folder: Path, declared: ModelSizes | None, section: str) -> ModelSizes:
    if declared is not None and not (folder / "config.json").is_file():
        return declared
    found = read_sizes(folder)
    if declared not in (None, found):
        raise ConfigError(
            f"{section}.sizes declares {_difference(declared, found)} of {folder}: correct "
            f"{section}.sizes, or {section}.path"
        )
    return found


def _built_in(policy: PolicyConfig) -> ModelSizes:
    return ModelSizes(
        model_type="qwen3",
        hidden_size=policy.hidden_size,
        intermediate_size=policy.intermediate_size,
        num_hidden_layers=policy.layers,
        num_attention_heads=policy.heads,
        num_key_value_heads=policy.kv_heads,
        head_dim=policy.head_dim,
        vocab_size=policy.vocab_size,
        tie_word_embeddings=True,
    )


def _difference(declared: ModelSizes | None, found: ModelSizes) -> str:
    assert declared is not None
    pairs = zip(declared, found, strict=True)
    return ", ".join(
        f"{key} = {said} but it is {one}" for (key, said), (_, one) in pairs if said != one
    )


def read_sizes(folder: Path) -> ModelSizes:
    """Return the sizes of the model in a Hugging Face folder; raises `UnknownSizes`."""
    file = folder / "config.json"
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnknownSizes(str(file), f"cannot be read: {error}") from None
    if found.get("model_type") not in KNOWN:
        raise UnknownSizes(
            str(file), f"model_type is {found.get('model_type')!r}, counted are {', '.join(KNOWN)}"
        )
    if found["model_type"] == "qwen3_moe" and (
        found.get("mlp_only_layers") or found.get("decoder_sparse_step", 1) != 1
    ):
        raise UnknownSizes(
            str(file), "has layers without experts; only layers with experts are counted"
        )
    experts = {"num_experts": found.get("num_local_experts")}  # as newer files have it
    if found["model_type"] == "gpt_oss":
        experts["moe_intermediate_size"] = found.get("intermediate_size")
    found = {"num_key_value_heads": found.get("num_attention_heads"), **experts} | found
    given = {key: found[key] for key in ModelSizes.model_fields if found.get(key) is not None}
    try:
        return validated(ModelSizes, given)
    except ValidationError as error:
        raise UnknownSizes(str(file), f"has unfit sizes: {first_error(error)['msg']}") from None


def head_width(sizes: ModelSizes) -> int:
    """Return the width of one head."""
    return sizes.head_dim or sizes.hidden_size // sizes.num_attention_heads


def query_width(sizes: ModelSizes) -> int:
    """Return the width of all query heads of one token."""
    return sizes.num_attention_heads * head_width(sizes)


def key_width(sizes: ModelSizes) -> int:
    """Return the width of all key heads of one token; the values have the same."""
    return sizes.num_key_value_heads * head_width(sizes)


def parameter_count(sizes: ModelSizes) -> int:
    """Return the number of parameters; a tied head is counted once."""
    layers = sizes.num_hidden_layers * layer_parameters(sizes)
    return embedding_parameters(sizes) + layers + sizes.hidden_size


def embedding_parameters(sizes: ModelSizes) -> int:
    """Return the number of parameters of the embedding and of an untied head."""
    return sizes.vocab_size * sizes.hidden_size * (1 if sizes.tie_word_embeddings else 2)


def layer_parameters(sizes: ModelSizes) -> int:
    """Return the number of parameters of one decoder layer."""
    return sum(math.prod(shape) for _, shape in _layer(sizes, trained=True))


def expert_parameters(sizes: ModelSizes) -> int:
    """Return the number of parameters of all experts of one layer, without their router."""
    weights = _layer(sizes, trained=True)
    return sum(math.prod(shape) for name, shape in weights if name.startswith("mlp.experts."))


def adapter_parameters(sizes: ModelSizes, rank: int, targets: Sequence[str]) -> int:
    """Return the number of parameters of LoRA adapters on these layers of every decoder layer."""
    hidden, queries, keys = sizes.hidden_size, query_width(sizes), key_width(sizes)
    ends = {"q_proj": hidden + queries, "o_proj": queries + hidden}
    ends |= dict.fromkeys(("k_proj", "v_proj"), hidden + keys)
    if not sizes.is_mixture:  # experts are one tensor, which gets no adapter
        width = hidden + sizes.intermediate_size
        ends |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), width)
    return sizes.num_hidden_layers * rank * sum(ends.get(name, 0) for name in targets)


def inner_width(sizes: ModelSizes) -> int:
    """Return the width of the feed-forward layers that compute one token, together."""
    if not sizes.is_mixture:
        return sizes.intermediate_size
    return sizes.num_experts_per_tok * sizes.moe_intermediate_size


def cache_numbers(sizes: ModelSizes) -> int:
    """Return how many numbers a KV cache stores per token."""
    return 2 * sizes.num_hidden_layers * key_width(sizes)


Weight = tuple[str, tuple[int, ...]]


def decoder_weights(sizes: ModelSizes, *, trained: bool = False) -> Iterator[Weight]:
    """Yield the name and shape of every weight that a decoder of these sizes cannot do without.

    With `trained` those that are trained: all of them, the experts of a layer as one tensor.
    """
    hidden, vocabulary = sizes.hidden_size, sizes.vocab_size
    yield "embed_tokens.weight", (vocabulary, hidden)
    yield "norm.weight", (hidden,)
    if not sizes.tie_word_embeddings:
        yield "lm_head.weight", (vocabulary, hidden)
    for layer in range(sizes.num_hidden_layers):
        for name, shape in _layer(sizes, trained):
            yield f"layers.{layer}.{name}", shape


def _feed_forward(sizes: ModelSizes, trained: bool) -> Iterator[Weight]:
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    if sizes.is_mixture:
        inner = sizes.moe_intermediate_size
        yield "mlp.gate.weight", (sizes.num_experts, hidden)
    if sizes.is_mixture and trained:
        yield "mlp.experts.gate_up_proj", (sizes.num_experts, 2 * inner, hidden)
        yield "mlp.experts.down_proj", (sizes.num_experts, hidden, inner)
        return
    experts = [f"experts.{one}." for one in range(sizes.num_experts)] or [""]
    for expert in experts:
        yield f"mlp.{expert}gate_proj.weight", (inner, hidden)
        yield f"mlp.{expert}up_proj.weight", (inner, hidden)
        yield f"mlp.{expert}down_proj.weight", (hidden, inner)


def _experts_in_one(sizes: ModelSizes) -> Iterator[Weight]:
    """Yield those of gpt-oss, whose experts are one tensor, and its sinks."""
    count, hidden, width = sizes.num_experts, sizes.hidden_size, sizes.moe_intermediate_size
    yield "mlp.router.weight", (count, hidden)
    yield "mlp.router.bias", (count,)
    yield "mlp.experts.gate_up_proj", (count, hidden, 2 * width)
    yield "mlp.experts.gate_up_proj_bias", (count, 2 * width)
    yield "mlp.experts.down_proj", (count, width, hidden)
    yield "mlp.experts.down_proj_bias", (count, hidden)
    yield "self_attn.sinks", (sizes.num_attention_heads,)


def _layer(sizes: ModelSizes, trained: bool) -> Iterator[Weight]:
    hidden = sizes.hidden_size
    queries, keys = query_width(sizes), key_width(sizes)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    in_one = sizes.model_type == "gpt_oss"
    yield from _experts_in_one(sizes) if in_one else _feed_forward(sizes, trained)
    yield "self_attn.o_proj.weight", (hidden, queries)
    if trained and sizes.attention_bias and sizes.model_type != "qwen2":
        yield "self_attn.o_proj.bias", (hidden,)
    for part, width in (("q", queries), ("k", keys), ("v", keys)):
        yield f"self_attn.{part}_proj.weight", (width, hidden)
        if sizes.model_type == "qwen2" or sizes.attention_bias:
            yield f"self_attn.{part}_proj.bias", (width,)
    if sizes.norms_heads:
        yield "self_attn.q_norm.weight", (head_width(sizes),)
        yield "self_attn.k_norm.weight", (head_width(sizes),)
