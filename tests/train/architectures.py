"""Every causal architecture of transformers, made tiny: sizes are found by the names of a config's keys."""

from __future__ import annotations

import re
from typing import Any

from transformers import AutoConfig, PretrainedConfig

WIDTH, HEADS, LAYERS, POSITIONS = 32, 2, 2, 128

# The first that matches the name of a key decides; a key with another type than a whole number keeps its default.
RULES: list[tuple[str, int]] = [
    (r"num_kv_shared_layers|num_nextn_predict_layers|num_mem_blocks", 0),
    (r"first_k_dense_replace|n_groups?$|topk_group|num_expert_group|n_shared_experts|num_shared_experts", 1),
    (r"^qk_head_dim$", 2 * WIDTH // HEADS),
    (r"layers?$|n_layer|num_blocks$|depth$", LAYERS),
    (r"head_dim|headdim|d_head|d_kv|kv_channels|head_size|dim_head|mamba_d_head", WIDTH // HEADS),
    (r"heads?$|n_head|heads_", HEADS),
    (r"experts_per_tok|top_?k|moe_k|top_k", 2),
    (r"experts?$|moe_num_experts", 4),
    (r"lora_rank|rank$|rotary_dim", 8),
    (r"intermediate|ffn|d_ff|^dff|dim_ff|mlp_dim|d_inner|feed_forward|multiple_size", 2 * WIDTH),
    (r"hidden_size|d_model|n_embd|emb_dim|embedding_size|embed_dim|embedding_dim|proj_dim|dim_model$|lru_width", WIDTH),
    (r"max_position|n_positions|max_seq|n_ctx|context_length|max_target|max_source|model_max_length", POSITIONS),
    (r"state_size|d_state", 8),
    (r"chunk_size$|sliding_window$|window_size|attention_window", 16),
    (r"vocab_size_per_layer_input|ngram_vocab|audio_vocab|group_vocab", 300),
]
_ZAMBA: dict[str, Any] = {
    "attention_hidden_size": 64, "attention_head_dim": 32, "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
}
# What no rule can know.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 4}, "granitemoehybrid": {"mamba_n_heads": 4}, "mamba2": {"num_heads": 4},
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dory": {"num_hidden_layers": 3, "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_dense": {"head_dim": 16}, "hunyuan_v1_moe": {"head_dim": 16}, "ministral": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron": {"num_key_value_heads": 2},
    "xmod": {"default_language": "en_XX"},
    "zamba": {**_ZAMBA}, "zamba2": {**_ZAMBA, "n_mamba_heads": 4, "num_mem_blocks": 1},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "mimo_v2_flash": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 48, "v_head_dim": 32},
    "reformer": {"axial_pos_embds": False, "is_decoder": True},
}


def tiny_config(architecture: str) -> dict[str, Any]:
    """The keys of `model.config` that make this architecture tiny."""
    try:
        defaults = AutoConfig.for_model(architecture)
    except Exception:  # its own defaults make no config: to be refused
        return {}
    return _shrunk(defaults) | OVERRIDES.get(architecture, {})


def _shrunk(config: PretrainedConfig) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    for key, value in config.to_dict().items():
        attribute = vars(config).get(key)
        if key == "is_decoder":
            sizes[key] = True  # BERT and its kin look ahead without
        elif isinstance(attribute, PretrainedConfig):
            sizes[key] = _shrunk(attribute)
        elif type(value) is int and not key.startswith("_"):
            small = next((small for pattern, small in RULES if re.search(pattern, key)), None)
            if small is not None and value > small:
                sizes[key] = small
    return sizes
