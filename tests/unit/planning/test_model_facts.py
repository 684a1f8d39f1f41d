"""What a config asks of a model is refused by the facts that are known of it.

Parameters are counted exactly, for the models that people run.

Weights that are not finite are found in each type, wherever they are; no others are.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from composer_mesh.configs.policy import ModelSizes
from composer_mesh.planning.model_facts import (
    AttentionCall,
    ModelFacts,
    check_model_fits,
    check_model_teaches,
)
from composer_mesh.planning.model_folder import PIECE_BYTES, SAMPLE_BYTES, not_finite
from composer_mesh.planning.model_refusals import UnfitModel
from composer_mesh.planning.model_sizes import (
    KNOWN,
    UnknownSizes,
    adapter_parameters,
    cache_numbers,
    head_width,
    layer_parameters,
    parameter_count,
    read_sizes,
)

PLAIN = AttentionCall(replaceable=True, window=None, more=())


FACTS = ModelFacts(
    name="QwenForCausalLM",
    rows=400,
    layers=2,
    kinds=("full_attention",),
    listed=True,
    linear=("k_proj", "o_proj"),
    positions=4096,
    head=None,
    attention=(PLAIN, PLAIN),
    implementations=("sdpa", "flex", "flash", "eager"),
)


CAPPED = replace(FACTS, implementations=("flex", "eager"))


WINDOW = replace(
    FACTS, kinds=("sliding_attention",), attention=(replace(PLAIN, window=8),) * 2, listed=False
)


EMBEDDED = {"generator": {"engine": "embedded"}}


VLLM = {"generator": {"engine": "vllm"}}


CONTEXT = {
    "trainer": {"ranks": 8, "context_parallel": 8, "packing": True},
    "policy": {"path": "model"},
}


ADAPTERS = {"trainer": {"lora": {"sync": "adapters"}}, "sdpo": {"placement": "inline"}}


EXPERTS = {"trainer": {"ranks": 4, "expert_parallel": 2}}


def lora(*targets: str) -> dict[str, Any]:
    return {"trainer": {"lora": {"targets": list(targets)} if targets else {}}}


def test_facts_survive_json() -> None:
    assert ModelFacts.of(json.loads(json.dumps(asdict(WINDOW)))) == WINDOW


@pytest.mark.parametrize("sections", [EMBEDDED, VLLM, lora(), lora("k_proj")])
def test_a_plain_model_can_do_everything(sections: Any, build_config: Any) -> None:
    check_model_fits(FACTS, build_config(**sections))


@pytest.mark.parametrize(
    ("facts", "sections", "told"),
    [
        (replace(FACTS, head=2.5), VLLM, "up to 2.5, which the fused losses do not support"),
        (replace(FACTS, positions=16), VLLM, "positions up to 16: lower policy.max_context to 16"),
        (FACTS, lora("q_proj"), r"no layer q_proj .*: name linear layers .* \(k_proj, o_proj\)"),
        (replace(FACTS, linear=()), lora(), "trainer.lora is set but QwenForCausalLM has no linea"),
        (WINDOW, EMBEDDED, 'looks back 8 tokens but policy.max_context is .*engine to "vllm"'),
        (replace(FACTS, kinds=("conv",)), EMBEDDED, "has layers of conv; set generator.engine"),
        (replace(FACTS, attention=(PLAIN,)), EMBEDDED, "1 of its 2 layers call an attention"),
        (
            replace(FACTS, attention=(PLAIN, replace(PLAIN, width=2))),
            EMBEDDED,
            "its layers have keys of different shapes",
        ),
        (replace(FACTS, tried={"engine": "it differs"}), EMBEDDED, "^it differs$"),
        (replace(FACTS, tried={"rows": "it looks ahead"}), VLLM, "^it looks ahead$"),
        (
            replace(FACTS, tried={"packing sdpa": "it does not pack"}),
            {"trainer": {"packing": True}},
            "^it does not pack$",
        ),
        (
            replace(FACTS, tried={"sharing": "it does not share"}),
            {"trainer": {"prefix_sharing": True}},
            "^it does not share$",
        ),
        (
            replace(FACTS, tried={"long rows": "it counts"}, scale=511),
            VLLM,
            "^it counts, or lower policy.max_context from 512 to 511, beyond which it is so$",
        ),
        (
            replace(FACTS, attention=(PLAIN, replace(PLAIN, replaceable=False))),
            EMBEDDED,
            "its layer 1 computes attention of its own",
        ),
        (
            replace(FACTS, attention=(replace(PLAIN, more=("s_aux",)),) * 2),
            EMBEDDED,
            "it has attention with sinks",
        ),
        (
            replace(CAPPED, attention=(replace(PLAIN, more=("softcap",)),) * 2),
            VLLM,
            "trainer.attention = 'sdpa', which computes no caps: set it to 'flex' or 'eager'",
        ),
        (replace(FACTS, name="GptOssForCausalLM"), VLLM, "train adapters, .* sync = 'adapters'$"),
        (replace(FACTS, name="Qwen3NextForCausalLM"), VLLM, "set it to 'bfloat16'"),
        (
            replace(FACTS, experts=(8,)),
            {**VLLM, **ADAPTERS},
            "need Triton: give placement.generator GPUs, or set it to 'merged'$",
        ),
        (
            replace(FACTS, all_keys=256),
            VLLM,
            "max_context is 512 but .* beyond 256 positions, .*: lower policy.max_context to 256$",
        ),
        (
            replace(FACTS, softcap=30.0),
            {**VLLM, "sdpo": {"alpha": 0.1, "teacher": "trust_region"}},
            "caps its logits at 30 but .* set sdpo.teacher to 'ema', 'live' or 'frozen'",
        ),
        (CAPPED, VLLM, "'sdpa', which it does not support: set it to 'flex' or 'eager'"),
        (
            replace(FACTS, kinds=("mamba",)),
            {**VLLM, "trainer": {"packing": True}},
            "set trainer.packing to false",
        ),
        (
            replace(FACTS, kinds=("full_attention", "mamba")),
            {**VLLM, "trainer": {"prefix_sharing": True}},
            "has layers of mamba, but prefixes are shared .* set trainer.prefix_sharing to false",
        ),
        (
            replace(FACTS, attention=(replace(PLAIN, heads=4, key_heads=4),) * 2),
            {**VLLM, **CONTEXT},
            "context_parallel is 8 but .* 4 heads of queries and 4 of keys, .* one of 1, 2, 4$",
        ),
        (
            replace(FACTS, attention=(replace(PLAIN, heads=16, key_heads=3),) * 2),
            {**VLLM, **CONTEXT},
            "16 heads of queries and 3 of keys, .* set it to one of 1$",
        ),
        (
            replace(FACTS, attention=(PLAIN,)),
            {**VLLM, **CONTEXT},
            "cannot have trainer.context_parallel = 8: some of its layers .*: set it to 1",
        ),
        (FACTS, {**VLLM, **EXPERTS}, "expert_parallel is 2 but .* has no layers whose experts"),
        (
            replace(FACTS, experts=(9,)),
            {**VLLM, **EXPERTS},
            "9 experts in a layer, which 4 ranks .* set trainer.ranks to one of 3, 9, or",
        ),
        (
            WINDOW,
            {**VLLM, "trainer": {"activation_checkpointing": True}},
            "no list of 2 decoder layers",
        ),
    ],
)
def test_what_a_model_cannot_do_is_told_with_the_repair(
    facts: ModelFacts, sections: Any, told: str, build_config: Any
) -> None:
    with pytest.raises(UnfitModel, match=told) as refused:
        check_model_fits(facts, build_config(**sections))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "facts", [WINDOW, replace(FACTS, kinds=("conv",)), replace(FACTS, attention=(PLAIN,))]
)
def test_nothing_of_the_embedded_engine_is_said_where_vllm_serves(
    facts: ModelFacts, build_config: Any
) -> None:
    check_model_fits(facts, build_config(**VLLM))


def test_vllm_serves_a_model_whose_experts_it_never_updates_with_adapters_alone(
    build_config: Any,
) -> None:
    named = replace(FACTS, name="GptOssForCausalLM")
    check_model_fits(named, build_config(**VLLM, **ADAPTERS))
    with pytest.raises(UnfitModel, match=r"give placement\.generator GPUs$"):
        check_model_fits(replace(named, experts=(8,)), build_config(**VLLM, **ADAPTERS))


@pytest.mark.parametrize(("heads", "key_heads"), [(8, 8), (16, 8), (32, 4), (8, 1)])
def test_ranks_divide_heads_and_divide_or_repeat_those_of_keys(
    heads: int, key_heads: int, build_config: Any
) -> None:
    call = replace(PLAIN, heads=heads, key_heads=key_heads)
    check_model_fits(replace(FACTS, attention=(call,) * 2), build_config(**VLLM, **CONTEXT))


def test_a_teacher_needs_positions_for_the_policys_conversations(build_config: Any) -> None:
    config = build_config(**EMBEDDED)
    check_model_teaches(WINDOW, config)  # its attention is its own matter
    with pytest.raises(UnfitModel, match="has positions up to 16: lower"):
        check_model_teaches(replace(FACTS, positions=16), config)
    with pytest.raises(UnfitModel, match="which the fused losses do not support"):
        check_model_teaches(replace(FACTS, head=0.5), config)


def test_what_only_weights_show_is_not_refused(build_config: Any) -> None:
    check_model_fits(replace(FACTS, attention=None), build_config(**EMBEDDED))


# What the models' own config.json files say.
QWEN25_05B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}


QWEN3_32B = QWEN3_8B | {
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
}


LLAMA31_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(
    ("sizes", "published"),
    [
        (QWEN25_05B, 494_032_768),
        (QWEN3_8B, 8_190_735_360),
        (QWEN3_32B, 32_762_123_264),
        (LLAMA31_8B, 8_030_261_248),
    ],
    ids=["Qwen2.5-0.5B", "Qwen3-8B", "Qwen3-32B", "Llama-3.1-8B"],
)
def test_parameters_are_those_that_the_models_are_published_with(
    sizes: dict[str, Any], published: int
) -> None:
    assert parameter_count(ModelSizes.model_validate(sizes)) == published


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KNOWN)
def test_parameters_are_those_of_the_model_that_transformers_builds(
    kind: str, bias: bool, tied: bool, tmp_path: Path
) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8 if kind == "qwen2" else 24,
        "vocab_size": 320,
    }
    extra = {"attention_bias": bias} if kind in ("llama", "qwen3") else {}
    config = transformers.AutoConfig.for_model(kind, tie_word_embeddings=tied, **sizes, **extra)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    found = read_sizes(tmp_path)
    assert parameter_count(found) == sum(weight.numel() for weight in model.parameters())
    layer = model.model.layers[0]
    assert layer_parameters(found) == sum(weight.numel() for weight in layer.parameters())


def test_adapters_have_both_of_their_ends() -> None:
    sizes = ModelSizes.model_validate(QWEN3_8B)
    one_layer = 16 * ((4096 + 4096) + (4096 + 1024) + (12288 + 4096))
    assert adapter_parameters(sizes, 16, ("q_proj", "v_proj", "down_proj")) == 36 * one_layer


def test_a_cache_has_keys_and_values_of_the_shared_heads() -> None:
    assert cache_numbers(ModelSizes.model_validate(QWEN3_8B)) == 2 * 36 * 8 * 128


def test_heads_without_a_width_share_the_hidden_size() -> None:
    assert head_width(ModelSizes.model_validate(QWEN25_05B)) == 64
    with pytest.raises(ValueError, match="write head_dim too"):
        ModelSizes.model_validate(QWEN25_05B | {"num_attention_heads": 13})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        (json.dumps({"model_type": "mamba"}), "model_type is 'mamba', counted are llama"),
        (json.dumps(QWEN3_8B | {"hidden_size": 0}), "has unfit sizes"),
    ],
)
def test_what_cannot_be_counted_is_said(text: str | None, why: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnknownSizes, match=why):
        read_sizes(tmp_path)


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2)


def stored(tmp_path: Path, *tensors: torch.Tensor) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({f"layer.{place}": one for place, one in enumerate(tensors)}, path)
    return path


@pytest.mark.parametrize("kind", FLOATS, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 500, 999])
def test_one_value_of_a_tensor_is_found(
    tmp_path: Path, kind: torch.dtype, value: float, place: int
) -> None:
    whole, broken = torch.ones(1000), torch.ones(1000)
    broken[place] = value
    path = stored(tmp_path, whole.to(kind), broken.to(kind), whole.to(torch.int64))
    assert list(not_finite([path])) == [(path, "layer.1")]


@pytest.mark.parametrize("kind", FLOATS, ids=str)
def test_the_largest_and_the_smallest_values_are_finite(tmp_path: Path, kind: torch.dtype) -> None:
    about = torch.finfo(kind)
    ends = torch.tensor([about.max, about.min, about.tiny, 0.0, -0.0, 1.0], dtype=torch.float64)
    path = stored(tmp_path, ends.to(kind), torch.tensor([2**31 - 1, -1], dtype=torch.int32))
    assert list(not_finite([path])) == []


def test_a_value_at_the_end_of_the_last_piece_is_found(tmp_path: Path) -> None:
    tensor = torch.zeros(PIECE_BYTES // 2 + 3, dtype=torch.bfloat16)
    tensor[-1] = float("nan")
    path = stored(tmp_path, tensor)
    assert list(not_finite([path])) == [(path, "layer.0")]


def test_of_a_large_folder_the_beginning_of_each_tensor_is_read(tmp_path: Path) -> None:
    first, last = torch.zeros(SAMPLE_BYTES, dtype=torch.float32), torch.zeros(SAMPLE_BYTES)
    first[SAMPLE_BYTES // 4 - 1] = float("nan")
    last[-1] = float("nan")
    path = stored(tmp_path, first, last)
    assert {name for _, name in not_finite([path])} == {"layer.0", "layer.1"}
    assert list(not_finite([path], whole_bytes=0)) == [(path, "layer.0")]
