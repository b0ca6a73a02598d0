"""Parameter counts of one layer, by hand."""

from dataclasses import replace

from ap_search.spec.blocks import (
    Attention,
    AttentionKind,
    DenseFfn,
    LayerKind,
    LinearMixer,
    Model,
    MoeFfn,
    QkNorm,
)
from ap_search.spec.parameters import (
    active_layer_params,
    embedding_params,
    head_params,
    layer_params,
    mtp_extra_params,
    params_active,
    params_mtp,
    params_total,
)

GQA = Attention(num_heads=4, num_kv_heads=2, qk_head_dim=8, v_head_dim=8)
DENSE = LayerKind(mixer=GQA, ffn=DenseFfn(width=10))


def model_of(*kinds: LayerKind, **changes: object) -> Model:
    base = Model(
        name="m", hidden_size=16, vocab_size=100, tied_embeddings=False, kinds=kinds, layers=tuple(range(len(kinds)))
    )
    return replace(base, **changes)


def test_gqa_and_gated_ffn() -> None:
    """q 16*32, k and v 2*16*16, out 32*16 = 1536; SwiGLU 3*16*10 = 480; two norms of 16."""
    params = layer_params(model_of(DENSE), DENSE)
    assert (params.mixer_sharded, params.mixer_replicated) == (1536, 0)
    assert (params.ffn_sharded, params.ffn_replicated, params.norms) == (480, 0, 32)
    assert params.total == 2048


def test_biases_and_qk_norm() -> None:
    """qkv bias 32+32 = 64 is cut; out bias 16 and q/k norms 2*8 are whole; ffn bias 2*10 cut and 16 whole."""
    kind = LayerKind(
        mixer=replace(GQA, qkv_bias=True, out_bias=True, qk_norm=QkNorm.HEAD), ffn=DenseFfn(width=10, bias=True)
    )
    params = layer_params(model_of(kind), kind)
    assert (params.mixer_sharded, params.mixer_replicated) == (1536 + 64, 16 + 16)
    assert (params.ffn_sharded, params.ffn_replicated) == (480 + 20, 16)


def test_qk_norm_of_the_whole_width() -> None:
    """(4 + 2 heads) * 8 = 48."""
    kind = replace(DENSE, mixer=replace(GQA, qk_norm=QkNorm.WIDTH))
    assert layer_params(model_of(kind), kind).mixer_replicated == 48


def test_gates_sinks_and_shared_keys() -> None:
    """Output gate 16*32 = 512, head gate 16*4 = 64, sinks 4; no value projection saves 16*16, shared k and v twice."""
    extra = replace(GQA, output_gate=True, head_gate=True, sink=True)
    assert layer_params(model_of(DENSE), replace(DENSE, mixer=extra)).mixer_sharded == 1536 + 512 + 64 + 4
    assert layer_params(model_of(DENSE), replace(DENSE, mixer=replace(GQA, key_is_value=True))).mixer_sharded == 1280
    assert layer_params(model_of(DENSE), replace(DENSE, mixer=replace(GQA, kv_from_below=True))).mixer_sharded == 1024


def test_low_rank_queries() -> None:
    """Down 16*6 + norm 6 whole; up 6*32 in place of 16*32."""
    params = layer_params(model_of(DENSE), replace(DENSE, mixer=replace(GQA, q_lora_rank=6)))
    assert (params.mixer_sharded, params.mixer_replicated) == (1536 - 512 + 192, 102)


def test_mla_with_indexer() -> None:
    """q up 6*4*10 = 240, kv up 5*4*(8+7) = 300, out 28*16 = 448; down 16*6+6 + 16*(5+2)+5 = 219.

    Indexer: 6*3*4 + 16*4 + 2*4 + 16*3 = 192.
    """
    mla = Attention(
        kind=AttentionKind.MLA, num_heads=4, num_kv_heads=4, qk_head_dim=10, v_head_dim=7, q_lora_rank=6,
        kv_lora_rank=5, qk_rope_head_dim=2, index_heads=3, index_head_dim=4, index_topk=9,
    )  # fmt: skip
    params = layer_params(model_of(DENSE), replace(DENSE, mixer=mla))
    assert (params.mixer_sharded, params.mixer_replicated) == (988, 219 + 192)
    whole = layer_params(model_of(DENSE), replace(DENSE, mixer=replace(mla, q_lora_rank=0, index_heads=0)))
    assert (whole.mixer_sharded, whole.mixer_replicated) == (988 - 240 + 16 * 40, 117)


def test_moe_layer() -> None:
    """Experts 4*3*16*5 = 960; shared 3*16*7 = 336 with gate 16; router 64 + bias 4. Active: 2 of 4 experts."""
    moe = MoeFfn(num_experts=4, top_k=2, expert_width=5, shared_width=7, shared_gate=True, router_bias=True)
    kind = replace(DENSE, ffn=moe)
    params = layer_params(model_of(kind), kind)
    assert (params.expert, params.router, params.latent) == (960, 68, 0)
    assert (params.shared_sharded, params.shared_replicated) == (336, 16)
    assert active_layer_params(model_of(kind), kind) == params.total - 480


def test_latent_experts_with_bias_and_two_matrices() -> None:
    """Expert 2*6*5 + 5 + 6 = 71, four of them; latent projections 2*16*6."""
    moe = MoeFfn(num_experts=4, top_k=1, expert_width=5, gated=False, expert_bias=True, latent_width=6)
    params = layer_params(model_of(DENSE), replace(DENSE, ffn=moe))
    assert (params.expert, params.latent) == (284, 192)


def test_linear_mixer_alone() -> None:
    """In 16*20, out 8*16; 9 small parameters; one norm; no feed-forward."""
    mixer = LinearMixer(name="scan", in_width=20, out_width=8, small_params=9, scan_flops_per_token=0, heads=2)
    kind = LayerKind(mixer=mixer, ffn=None, num_norms=1)
    params = layer_params(model_of(kind), kind)
    assert (params.mixer_sharded, params.mixer_replicated, params.norms, params.total) == (448, 9, 16, 473)


def test_totals() -> None:
    """Embedding and head 1600 each, final norm 16, layer 2048."""
    model = model_of(DENSE)
    assert params_total(model) == params_active(model) == 1600 * 2 + 16 + 2048
    assert params_total(replace(model, tied_embeddings=True)) == 1600 + 16 + 2048
    assert params_total(replace(model, norm_params_per_element=2)) == 1600 * 2 + 32 + 2048 + 32
    assert (embedding_params(model, 128), head_params(model, 128)) == (2048, 2048)
    assert head_params(replace(model, tied_embeddings=True, head_bias=True)) == 100
    assert embedding_params(replace(model, learned_positions=50, embedding_norm=True)) == 1600 + 800 + 16


def test_mtp() -> None:
    """Module: 2*16*16 + 3*16 = 560 and a layer of the last kind, or of the kind that is named."""
    moe = LayerKind(mixer=GQA, ffn=MoeFfn(num_experts=2, top_k=1, expert_width=5))
    model = model_of(DENSE, moe, mtp_layers=2)
    assert mtp_extra_params(model) == 560
    assert params_mtp(model) == 2 * (560 + layer_params(model, moe).total)
    assert params_mtp(replace(model, mtp_kind_index=0)) == 2 * (560 + 2048)
    assert params_mtp(replace(model, mtp_layers=0)) == 0
