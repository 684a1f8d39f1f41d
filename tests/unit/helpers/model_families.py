"""Tiny models with random weights of the families that people train, as folders of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from composer_mesh.actors.models.policy import class_for, save_policy

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
ROUTED: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
}
INDEXED: dict[str, Any] = {
    **{name: value for name, value in ROUTED.items() if name != "first_k_dense_replace"},
    "index_head_dim": 16,
    "index_n_heads": 2,
    "mlp_layer_types": ["dense", "sparse"],
}
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
}
CAPPED: dict[str, Any] = {"final_logit_softcapping": 2.0}
WINDOW: dict[str, Any] = {"sliding_window": 8}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

MULTIMODAL_ROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10_000.0,
    "mrope_section": [2, 3, 3],
}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "llama": {},
    "mistral": {"sliding_window": 512},
    "ministral": {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "phi": {},
    "phi3": {"sliding_window": None},
    "olmo": {},
    "olmo2": {},
    "glm": {},
    "glm4": {},
    "smollm3": {},
    "seed_oss": {},
    "ernie4_5": {},
    "hunyuan_v1_dense": {},
    "helium": {},
    "stablelm": {},
    "starcoder2": {"sliding_window": None},
    "nemotron": {},
    "arcee": {},
    "gemma": {},
    "granite": {"logits_scaling": 8.0},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 512},
    "gpt_neox": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1},
    "qwen3_moe": {**EXPERTS, "decoder_sparse_step": 1},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {**LATENT, **ROUTED},
    "deepseek_v3": {**LATENT, **ROUTED},
    "glm4_moe": {**ROUTED},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    "dots1": {**ROUTED, "layer_types": ["full_attention"] * 2, "sliding_window": None},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 6.0},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "ernie4_5_moe": {**EXPERTS, "moe_k": 2, "moe_num_experts": 4, "moe_num_shared_experts": 1},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, **WINDOW},
    "cohere": {},
    "cohere2": {**WINDOW},
    "gemma2": {**WINDOW, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.0},
    "vaultgemma": {**WINDOW, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.0},
    "gemma3n_text": {
        **WINDOW,
        **CAPPED,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 512,
        "num_kv_shared_layers": 0,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0, 0.0],
        "intermediate_size": [48, 48],
    },
    "gemma4_text": {**WINDOW, **CAPPED, "layer_types": ["sliding_attention", "full_attention"]},
    "nanochat": {**CAPPED},
    "qwen3_5_moe_text": {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 16},
    "granitemoehybrid": {
        **MAMBA,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "granite_swa": {**WINDOW, "logits_scaling": 8.0},
    "exaone_moe": {**WINDOW, **EXPERTS},
    "olmo_hybrid": {**LINEAR},
    "glm4_moe_lite": {**LATENT, **ROUTED},
    "deepseek_v32": {**LATENT, **ROUTED},
    "mimo_v2_flash": {**WINDOW, **ROUTED},
    "ministral3": {},
    "mistral3": {
        "text_config": {"model_type": "mistral", **SMALL, "sliding_window": None},
        "vision_config": {"model_type": "pixtral", **VISION, "head_dim": 8},
    },
    "qwen2_5_vl": {
        "text_config": {**SMALL, "rope_parameters": MULTIMODAL_ROPE},
        "vision_config": {"depth": 1, **VISION, "num_heads": 2, "out_hidden_size": 32},
    },
    "qwen3_vl": {
        "text_config": {**SMALL, "rope_parameters": MULTIMODAL_ROPE},
        "vision_config": {
            **VISION,
            "depth": 1,
            "num_heads": 2,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
        },
    },
    "gemma3_text": {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3": {
        "text_config": {**SMALL, **WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": {"model_type": "siglip_vision_model", **VISION},
        "mm_tokens_per_image": 4,
    },
    "olmo3": {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "exaone4": {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_next": {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 16},
    "qwen3_5": {"text_config": {**SMALL, **LINEAR}, "vision_config": {"depth": 1, **VISION}},
    "qwen3_5_text": {**LINEAR},
    "llama4_text": {
        "num_local_experts": 4,
        "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 8,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "moe_latent_size": None,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
    "apertus": {},
    "axk1": {**LATENT, **ROUTED},
    "bitnet": {},
    "cohere2_moe": {
        **WINDOW,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["sparse", "sparse"],
    },
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "gemma4_unified_text": {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 512},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gptj": {"rotary_dim": 8, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 512},
    "granitemoe_swa": {
        **WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "granitemoeshared": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "hy_v3": {**EXPERTS, "num_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"]},
    "hyperclovax": {},
    "jais2": {},
    "jetmoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16},
    "laguna": {
        **EXPERTS,
        **WINDOW,
        "shared_expert_intermediate_size": 16,
        "layer_types": ["full_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "longcat_flash": {
        **LATENT,
        "n_routed_experts": 4,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 16,
        "ffn_hidden_size": 48,
        "zero_expert_num": 1,
    },
    "mellum": {
        **WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "layer_types": ["full_attention", "full_attention"],
        "mlp_layer_types": ["sparse", "sparse"],
    },
    "minicpm3": {**LATENT, "scale_depth": 1.0, "dim_model_base": 32},
    "minimax": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["full_attention", "linear_attention"],
    },
    "minimax_m3_vl_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "rotary_dim": 8,
        "index_block_size": 8,
        "layer_types": ["full_attention", "full_attention"],
        "mlp_layer_types": ["sparse", "sparse"],
    },
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": 2, "n_head": 2},
    "mpt": {"d_model": 32, "n_heads": 2, "n_layers": 2, "expansion_ratio": 2},
    "biogpt": {},
    "xglm": {"ffn_dim": 48, "d_model": 32},
    "persimmon": {},
    "solar_open": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "youtu": {**LATENT},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2},
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8},
    "jamba": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "qwen3_5_moe": {
        "text_config": {**SMALL, **LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16},
        "vision_config": {"depth": 1, **VISION},
    },
    "qwen3_vl_moe": {
        "text_config": {**SMALL, **EXPERTS, "rope_parameters": MULTIMODAL_ROPE},
        "vision_config": {
            **VISION,
            "depth": 1,
            "num_heads": 2,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
        },
    },
    "gpt_neox_japanese": {},
    "ctrl": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 512},
    "afmoe": {
        **EXPERTS,
        **WINDOW,
        "num_shared_experts": 1,
        "num_dense_layers": 1,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "axk2": {**LATENT, **INDEXED},
    "glm_moe_dsa": {**LATENT, **INDEXED},
    "hy_v4": {**LATENT, **INDEXED, "hc_mult": 2},
    "doge": {},
}
MIXTURES = ("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe")


def family_config(name: str, tokenizer: Any, **sizes: Any) -> Any:
    """The config of a tiny model whose vocabulary is the tokenizer's; `sizes` replace its own."""
    from transformers import AutoConfig

    ids = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    own = FAMILIES[name]
    if "text_config" in own:
        return AutoConfig.for_model(name, **{**own, "text_config": {**own["text_config"], **ids}})
    return AutoConfig.for_model(name, **{**SMALL, **ids, **own, **sizes})


def family_model(name: str, tokenizer: Any, seed: int = 0, **sizes: Any) -> Any:
    """A model in float32, with weights wide enough that predictions depend on the context."""
    torch.manual_seed(seed)
    config = family_config(name, tokenizer, **sizes)
    model = class_for(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.normal_(std=0.15)
    return model.eval()


def family_folder(name: str, tokenizer: Any, folder: Path, **sizes: Any) -> Path:
    """A folder with such a model, its tokenizer and its chat template."""
    save_policy(family_model(name, tokenizer, **sizes), tokenizer, folder)
    return folder
