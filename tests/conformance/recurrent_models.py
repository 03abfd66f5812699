"""Models with layers that have a state in place of keys and values."""

from architecture import ATTENTION, EXPERTS, NO_ATTENTION, NO_PIPELINE, Architecture, config, layers

_MAMBA = {"hidden_size": 64, "num_hidden_layers": 2, "expand": 2, "state_size": 32}
_MAMBA_HEADS = {"mamba_n_heads": 4, "mamba_d_head": 64, "mamba_n_groups": 2, "mamba_d_state": 32}
# Both kinds on each rank, or vLLM finds no way to lay out caches that all ranks take.
_CONVOLUTIONS = layers(*["conv", "full_attention"] * 2)
_NO_POSITIONS = {"transformers": "its implementation in transformers takes no positions"}

RECURRENT_MODELS = (
    Architecture(
        name="qwen3-next",
        config=config(
            "Qwen3NextConfig",
            **ATTENTION | layers(*["linear_attention", "full_attention"] * 2),
            **EXPERTS,
            shared_expert_intermediate_size=64,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
        ),
        experts=True,
        not_offered=NO_ATTENTION,
    ),
    Architecture(
        name="mamba",
        config=config("MambaConfig", **_MAMBA, time_step_rank=8),
        generates=False,
        not_offered=_NO_POSITIONS,
    ),
    Architecture(
        name="falcon-mamba",
        config=config("FalconMambaConfig", **_MAMBA, time_step_rank=8),
        generates=False,
        not_offered=_NO_POSITIONS,
    ),
    Architecture(
        name="mamba2",
        config=config("Mamba2Config", **_MAMBA, head_dim=32, num_heads=4, n_groups=2),
        not_offered=NO_ATTENTION | NO_PIPELINE,
    ),
    Architecture(
        name="falcon-h1",
        config=config("FalconH1Config", **ATTENTION, **_MAMBA_HEADS, mamba_d_ssm=256),
    ),
    Architecture(
        name="granite-moe-hybrid",
        config=config(
            "GraniteMoeHybridConfig",
            **ATTENTION | layers("mamba", "attention"),
            **_MAMBA_HEADS,
            num_local_experts=8,
            num_experts_per_tok=2,
            shared_intermediate_size=64,
        ),
        experts=True,
        not_offered=NO_ATTENTION | {"pp2": "its loader fails at a layer of the other rank"},
    ),
    Architecture(
        name="jamba",
        config=config(
            "JambaConfig",
            **ATTENTION | {"num_hidden_layers": 4},
            num_experts=8,
            num_experts_per_tok=2,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_dt_rank=8,
            mamba_d_state=16,
        ),
        generates=False,
        experts=True,
        not_offered=NO_ATTENTION,
    ),
    Architecture(
        name="zamba2",
        config=config(
            "Zamba2Config",
            hidden_size=128,
            num_hidden_layers=4,
            layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
            num_attention_heads=4,
            intermediate_size=128,
            n_mamba_heads=4,
            mamba_d_state=32,
            mamba_ngroups=2,
            num_mem_blocks=1,
            adapter_rank=16,
            use_shared_attention_adapter=True,
            use_mem_rope=True,
            tie_word_embeddings=True,
        ),
        not_offered=NO_PIPELINE | {"transformers": "one layer of attention cannot serve several modules"},
    ),
    Architecture(
        name="nemotron-h",
        config=config(
            "NemotronHConfig",
            **{name: value for name, value in ATTENTION.items() if name != "num_hidden_layers"},
            layers_block_type=["linear_attention", "full_attention", "mlp"] * 2,
            ssm_state_size=32,
            mamba_num_heads=4,
            mamba_head_dim=64,
            n_groups=2,
        ),
        not_offered=NO_ATTENTION,
    ),
    Architecture(
        name="lfm2",
        config=config(
            "Lfm2Config",
            **ATTENTION | _CONVOLUTIONS,
            tie_word_embeddings=True,
            block_auto_adjust_ff_dim=False,
            block_dim=128,
            conv_dim=128,
        ),
        not_offered=NO_ATTENTION,
    ),
    Architecture(
        name="lfm2-moe",
        config=config(
            "Lfm2MoeConfig",
            **ATTENTION | _CONVOLUTIONS,
            **EXPERTS,
            tie_word_embeddings=True,
            num_dense_layers=1,
        ),
        experts=True,
        not_offered=NO_ATTENTION,
    ),
)
