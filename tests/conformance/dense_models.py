"""Models whose layers are all attention and one feed-forward network."""

from architecture import (
    ATTENTION,
    NO_PIPELINE,
    NOT_COMPATIBLE,
    SLIDING,
    VOCABULARY,
    Architecture,
    config,
    layers,
)

_PLAIN = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_TIED = {"tie_word_embeddings": True}

DENSE_MODELS = (
    Architecture(name="qwen2", config=config("Qwen2Config", **ATTENTION)),
    Architecture(name="qwen3", config=config("Qwen3Config", **ATTENTION)),
    Architecture(name="qwen3-tied", config=config("Qwen3Config", **ATTENTION, **_TIED)),
    Architecture(name="llama", config=config("LlamaConfig", **ATTENTION)),
    Architecture(
        name="llama-bias-mqa",
        config=config(
            "LlamaConfig", **ATTENTION | {"num_key_value_heads": 1}, attention_bias=True, mlp_bias=True
        ),
    ),
    Architecture(name="mistral", config=config("MistralConfig", **ATTENTION, sliding_window=None)),
    Architecture(name="phi3", config=config("Phi3Config", **ATTENTION)),
    Architecture(name="gemma", config=config("GemmaConfig", **ATTENTION, **_TIED)),
    Architecture(name="gemma2", config=config("Gemma2Config", **ATTENTION | SLIDING, **_TIED)),
    Architecture(name="gemma3", config=config("Gemma3TextConfig", **ATTENTION | SLIDING, **_TIED)),
    Architecture(
        name="gemma3n",
        config=config(
            "Gemma3nTextConfig",
            **ATTENTION
            | layers(*["sliding_attention", "full_attention"] * 2)
            | {"intermediate_size": [128] * 4},
            **_TIED,
            sliding_window=32,
            vocab_size_per_layer_input=VOCABULARY,
            hidden_size_per_layer_input=32,
            laurel_rank=16,
            num_kv_shared_layers=2,
            activation_sparsity_pattern=[0.9, 0.9, 0.0, 0.0],
        ),
        not_offered=NO_PIPELINE,
    ),
    Architecture(
        name="gemma4",
        config=config(
            "Gemma4TextConfig",
            **ATTENTION | layers(*["sliding_attention", "full_attention"] * 2),
            **_TIED,
            sliding_window=32,
            vocab_size_per_layer_input=VOCABULARY,
            hidden_size_per_layer_input=32,
            num_kv_shared_layers=2,
        ),
        not_offered={"pp2": "a layer cannot share keys and values with one of another rank"},
    ),
    Architecture(
        name="gpt2",
        config=config("GPT2Config", n_embd=128, n_layer=2, n_head=4, n_positions=256, **_TIED),
        not_offered={"transformers": "its loader skips c_attn.bias, whose name ends like that of a buffer"},
    ),
    Architecture(
        name="gptj",
        config=config("GPTJConfig", n_embd=128, n_layer=2, n_head=4, n_positions=256, rotary_dim=16),
        not_offered=NOT_COMPATIBLE,
    ),
    Architecture(
        name="gpt-neox",
        config=config(
            "GPTNeoXConfig",
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
        ),
    ),
    Architecture(
        name="gpt-bigcode",
        config=config("GPTBigCodeConfig", n_embd=128, n_layer=2, n_head=4, n_positions=256, **_TIED),
    ),
    Architecture(
        name="falcon",
        config=config(
            "FalconConfig",
            **_PLAIN,
            num_kv_heads=2,
            new_decoder_architecture=True,
            **_TIED,
        ),
        not_offered=NOT_COMPATIBLE,
    ),
    Architecture(
        name="bloom",
        config=config("BloomConfig", hidden_size=128, n_layer=2, n_head=4, **_TIED),
        not_offered=NOT_COMPATIBLE,
    ),
    Architecture(
        name="opt",
        config=config(
            "OPTConfig",
            **_PLAIN,
            word_embed_proj_dim=64,
            ffn_dim=128,
            **_TIED,
        ),
    ),
    Architecture(name="stablelm", config=config("StableLmConfig", **ATTENTION, use_qkv_bias=True)),
    Architecture(name="phi", config=config("PhiConfig", **ATTENTION), only_from_checkpoint=True),
    Architecture(name="starcoder2", config=config("Starcoder2Config", **ATTENTION, **_TIED)),
    Architecture(name="olmo", config=config("OlmoConfig", **ATTENTION)),
    Architecture(name="olmo2", config=config("Olmo2Config", **ATTENTION)),
    Architecture(name="olmo3", config=config("Olmo3Config", **ATTENTION | SLIDING)),
    Architecture(name="granite", config=config("GraniteConfig", **ATTENTION)),
    Architecture(name="cohere", config=config("CohereConfig", **ATTENTION, **_TIED, use_qk_norm=True)),
    Architecture(name="cohere2", config=config("Cohere2Config", **ATTENTION | SLIDING, **_TIED)),
    Architecture(name="nemotron", config=config("NemotronConfig", **ATTENTION)),
    Architecture(name="glm", config=config("GlmConfig", **ATTENTION)),
    Architecture(name="glm4", config=config("Glm4Config", **ATTENTION)),
    Architecture(name="exaone4", config=config("Exaone4Config", **ATTENTION | SLIDING)),
    Architecture(name="ernie4-5", config=config("Ernie4_5Config", **ATTENTION, **_TIED)),
    Architecture(name="apertus", config=config("ApertusConfig", **ATTENTION)),
    Architecture(name="arcee", config=config("ArceeConfig", **ATTENTION)),
    Architecture(name="seed-oss", config=config("SeedOssConfig", **ATTENTION)),
    Architecture(name="smollm3", config=config("SmolLM3Config", **ATTENTION, **_TIED)),
    Architecture(name="hunyuan-dense", config=config("HunYuanDenseV1Config", **ATTENTION)),
)
