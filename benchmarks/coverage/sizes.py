"""Small sizes and inputs for the classes: by the names that their configurations use, and what is special to one."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["INPUTS", "SIZES", "SPECIAL", "token_ids"]

# Small sizes by the names that transformers' configurations use. What is not named keeps its default.
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
    "max_position_embeddings": 128, "sliding_window": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8,
    "num_experts_per_tok": 2, "top_k_experts": 2, "moe_topk": 2, "moe_k": 2, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "index_topk": 4, "index_head_dim": 16, "index_n_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8,
}  # fmt: skip

# What a class needs beside SIZES, by its folder: fields of its configuration, `class` for the model where the first
# that fits is not the one, and `inputs` beside or instead of token ids.
SPECIAL: dict[str, dict[str, Any]] = {
    "beam": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "doge": {"is_moe": True, "num_experts": 64},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe", "moe"]},
    "dots3_note": {"use_sliding_window": False, "shared_experts_intermediate_size": 32},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [32, 16], "rope_parameters": {"mrope_section": [3, 3, 2]}},
    "flint": {"mlp_only_layers": [0]},
    "gemma4": {"enable_moe_block": True, "global_head_dim": 16, "vocab_size_per_layer_input": 256},
    "glm4v_moe": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}},
    "glm5_next": {
        "index_topk": 4, "index_kpool": 4, "qk_rope_head_dim": 0, "linear_head_dim": 16, "linear_num_heads": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "hy_v4_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}},
    "jamba": {"num_hidden_layers": 4, "attn_layer_offset": 1, "attn_layer_period": 2},
    "jetmoe": {"counted": "JetMoeMoE"},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "longcat_flash": {
        "num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 32, "zero_expert_num": 2,
        "head_dim": 8,
    },
    "nemotron_h": {
        "layer_types": ["linear_attention", "moe", "full_attention", "moe"], "num_hidden_layers": 4,
        "ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 32,
    },
    "nllb_moe": {
        "inputs": "encoder-decoder", "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32, "decoder_attention_heads": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2,
        "pad_token_id": 1, "bos_token_id": 0,
    },
    "step3p7": {"mlp_layer_types": ["dense", "sparse", "sparse"], "share_expert_dim": 32},
    "switch_transformers": {
        "inputs": "encoder-decoder", "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2,
        "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
    },
    "vitpose_backbone": {
        "inputs": "image", "num_experts": 4, "part_features": 16, "image_size": (32, 32), "num_hidden_layers": 2,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
    "Qwen3OmniMoeTalkerTextExperts": {"class": "Qwen3OmniMoeTalkerModel",
        "inputs": "embeddings", "shared_expert_intermediate_size": 32},
}  # fmt: skip


def token_ids(config: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    ids_BS = torch.randint(3, min(config.vocab_size, 250), (2, 9), generator=generator)
    return {"input_ids": ids_BS, "use_cache": False}


def _encoder_decoder(config: Any) -> dict[str, Any]:
    ids_BS = token_ids(config)["input_ids"]
    # Switch makes up this mask in eager only, and compiled fails without one.
    mask_BS = torch.ones_like(ids_BS)
    return {
        "input_ids": ids_BS,
        "attention_mask": mask_BS,
        "decoder_input_ids": ids_BS[:, :7],
        "use_cache": False,
    }


def _image(config: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(2, 3, *config.image_size, generator=generator)
    return {"pixel_values": pixels, "dataset_index": torch.tensor([0, 2])}


def _embeddings(config: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {"inputs_embeds": torch.randn(2, 9, config.hidden_size, generator=generator), "use_cache": False}


INPUTS = {"encoder-decoder": _encoder_decoder, "image": _image, "embeddings": _embeddings}
