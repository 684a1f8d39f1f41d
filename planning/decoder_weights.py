"""The names and shapes of a decoder's weights, in the names of Hugging Face without `model.`."""

from collections.abc import Iterator

from composer_mesh.configs.policy import ModelSizes
from composer_mesh.planning.model_sizes import head_width, key_width, query_width

Weight = tuple[str, tuple[int, ...]]


def decoder_weights(sizes: ModelSizes) -> Iterator[Weight]:
    """Yield the name and shape of every weight that a decoder of these sizes cannot do without."""
    hidden, vocabulary = sizes.hidden_size, sizes.vocab_size
    yield "embed_tokens.weight", (vocabulary, hidden)
    yield "norm.weight", (hidden,)
    if not sizes.tie_word_embeddings:
        yield "lm_head.weight", (vocabulary, hidden)
    for layer in range(sizes.num_hidden_layers):
        for name, shape in _layer(sizes):
            yield f"layers.{layer}.{name}", shape


def _feed_forward(sizes: ModelSizes) -> Iterator[Weight]:
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    if sizes.is_mixture:
        inner = sizes.moe_intermediate_size
        yield "mlp.gate.weight", (sizes.num_experts, hidden)
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


def _layer(sizes: ModelSizes) -> Iterator[Weight]:
    hidden = sizes.hidden_size
    queries, keys = query_width(sizes), key_width(sizes)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    yield from _experts_in_one(sizes) if sizes.model_type == "gpt_oss" else _feed_forward(sizes)
    yield "self_attn.o_proj.weight", (hidden, queries)
    for part, width in (("q", queries), ("k", keys), ("v", keys)):
        yield f"self_attn.{part}_proj.weight", (width, hidden)
        if sizes.model_type == "qwen2" or sizes.attention_bias:
            yield f"self_attn.{part}_proj.bias", (width,)
    if sizes.norms_heads:
        yield "self_attn.q_norm.weight", (head_width(sizes),)
        yield "self_attn.k_norm.weight", (head_width(sizes),)
