"""Models with experts, and attention in every layer."""

from architecture import ATTENTION, EXPERTS, SLIDING, Architecture, config

_LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
_DEEPSEEK = {
    **ATTENTION,
    "num_key_value_heads": 4,
    # Of the part with positions. The only sizes that vLLM's latent attention for CPUs has are 512 and 64.
    "head_dim": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_GPT_OSS = config("GptOssConfig", **ATTENTION | SLIDING | {"intermediate_size": 64}, **_LOCAL)

EXPERT_MODELS = (
    Architecture(
        name="mixtral",
        config=config("MixtralConfig", **ATTENTION, **_LOCAL, sliding_window=None),
        experts=True,
    ),
    Architecture(
        name="qwen2-moe",
        config=config("Qwen2MoeConfig", **ATTENTION, **EXPERTS, shared_expert_intermediate_size=128),
        experts=True,
    ),
    Architecture(name="qwen3-moe", config=config("Qwen3MoeConfig", **ATTENTION, **EXPERTS), experts=True),
    Architecture(
        name="deepseek-v2",
        config=config("DeepseekV2Config", **_DEEPSEEK, q_lora_rank=None, topk_method="group_limited_greedy"),
        experts=True,
    ),
    Architecture(
        name="deepseek-v3",
        config=config(
            "DeepseekV3Config",
            **_DEEPSEEK,
            q_lora_rank=64,
            num_nextn_predict_layers=0,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
        ),
        experts=True,
    ),
    Architecture(
        name="glm4-moe",
        config=config(
            "Glm4MoeConfig",
            **ATTENTION | {"num_hidden_layers": 4},
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_shared_experts=1,
            moe_intermediate_size=64,
            first_k_dense_replace=1,
            use_qk_norm=True,
            num_nextn_predict_layers=0,
        ),
        experts=True,
    ),
    Architecture(name="gpt-oss", config=_GPT_OSS, experts=True),
    Architecture(
        # On the CPU vLLM's attention keeps its sinks in float32 from the first forward pass on.
        name="gpt-oss-float16",
        config=_GPT_OSS,
        engine={"dtype": "float16"},
        experts=True,
    ),
    Architecture(
        name="llama4",
        config=config(
            "Llama4TextConfig",
            **ATTENTION,
            **_LOCAL | {"num_experts_per_tok": 1},
            intermediate_size_mlp=128,
            interleave_moe_layer_step=2,
            attention_chunk_size=128,
        ),
        experts=True,
        not_offered={"transformers": "its loader fails at the fused experts: their size does not match"},
    ),
    Architecture(name="granite-moe", config=config("GraniteMoeConfig", **ATTENTION, **_LOCAL), experts=True),
    Architecture(
        name="olmoe",
        config=config("OlmoeConfig", **ATTENTION, num_experts=8, num_experts_per_tok=2),
        experts=True,
    ),
    Architecture(
        name="phimoe",
        config=config("PhimoeConfig", **ATTENTION, **_LOCAL, attention_bias=True, lm_head_bias=True),
        called="PhiMoEForCausalLM",
        experts=True,
        not_offered={"transformers": "transformers has its class under another name"},
    ),
    Architecture(
        name="ernie4-5-moe",
        config=config(
            "Ernie4_5_MoeConfig",
            **ATTENTION,
            tie_word_embeddings=True,
            moe_num_experts=8,
            moe_k=2,
            moe_intermediate_size=64,
            moe_num_shared_experts=1,
            moe_layer_start_index=1,
            moe_layer_end_index=1,
        ),
        experts=True,
        not_offered={"pp2": "it ties the output layer on the rank that has none, too"},
    ),
    Architecture(
        name="hunyuan-moe",
        config=config("HunYuanMoEV1Config", **ATTENTION, num_experts=8, moe_topk=2),
        experts=True,
    ),
)
