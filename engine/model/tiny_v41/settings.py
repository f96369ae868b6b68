"""The model's dimensions as a config.json in the official layout."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from engine.model.tiny_v41.maths import next_primes
from engine.model.tiny_v41.tokenizer import IMAGE, NOISE

ENGRAM_LAYERS = (1, 3)
ENGRAM_ORDERS = (2, 3, 4)
ENGRAM_HEADS = 4
ENGRAM_START = 2001  # neither 2000 nor 2001 is a prime, so it does not matter whether the search includes its start
TRAINED_POSITIONS = 256


def config(tokenizer: Tokenizer, num_classes: int) -> dict[str, Any]:
    taken: set[int] = set()
    rows = [sum(p for _ in ENGRAM_ORDERS for p in next_primes(ENGRAM_START - 1, ENGRAM_HEADS, taken)) for _ in ENGRAM_LAYERS]
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 128,
        "moe_intermediate_size": 80,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 64,
        "o_lora_rank": 64,
        "o_groups": 2,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": TRAINED_POSITIONS,
        },
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 32,
        "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1],
        "compress_rope_theta": 160000,
        "kv_source_layer_ids": [2, 4],
        "index_source_layer_ids": [2, 4, 6],
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 32,
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 12,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": list(ENGRAM_LAYERS),
        "engram_num_embeddings": rows,
        "engram_max_ngram_size": max(ENGRAM_ORDERS),
        "engram_vocab_size": ENGRAM_START,
        "engram_n_heads": ENGRAM_HEADS,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": num_classes,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": tokenizer.token_to_id(NOISE),
        "dspark_target_layer_ids": [5, 6, 7],
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 8,
        "dspark_num_experts_per_tok": 2,
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": tokenizer.token_to_id(IMAGE),
        "text_config": text,
    }
