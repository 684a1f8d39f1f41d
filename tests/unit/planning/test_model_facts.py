"""What a config asks of a model is refused by the facts that are known of it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from composer_mesh.planning.model_facts import (
    AttentionCall,
    ModelFacts,
    check_model_fits,
    check_model_teaches,
)
from composer_mesh.planning.model_refusals import UnfitModel

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
        (replace(FACTS, head=2.5), VLLM, "up to 2.5, which the fused losses do not know"),
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
    with pytest.raises(UnfitModel, match="which the fused losses do not know"):
        check_model_teaches(replace(FACTS, head=0.5), config)


def test_what_only_weights_show_is_not_refused(build_config: Any) -> None:
    check_model_fits(replace(FACTS, attention=None), build_config(**EMBEDDED))
