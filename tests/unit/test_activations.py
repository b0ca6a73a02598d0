"""Saved and live activations of each block kind, worked out by hand.

Unless said otherwise: hidden 1024, 16 query heads and 8 key heads of 64, one sequence of 4096 tokens.
"""

from dataclasses import replace

import numpy as np
import pytest

from ap_search.cost.activations import (
    BlockMemory,
    attention_saved_bytes,
    embedding_memory,
    head_memory,
    layer_memory,
    logits_bytes,
    mla_up_projected_bytes,
    mtp_memory,
    softmax_bytes,
)
from ap_search.cost.blocks import block_costs
from ap_search.cost.dispatch import DispatchShape
from ap_search.cost.dispatch_memory import (
    dispatch_state_bytes,
    dispatch_transient_bytes,
    dispatcher_buffer_bytes,
)
from ap_search.cost.moe import dispatch_shape
from ap_search.cost.shapes import Shapes, block_shapes
from ap_search.plan.plan import Dispatcher, Recompute
from ap_search.plan.table import PlanTable
from ap_search.spec.blocks import Attention, DenseFfn, LayerKind, LinearMixer, MoeFfn, QkNorm
from tests.cost_cases import V3_ATTENTION, context, gqa, plan, price, small_model

T = 4096
MIXER = gqa(16, 8, 64)
DENSE = LayerKind(mixer=MIXER, ffn=DenseFfn(width=2048))
NOTHING = LayerKind(mixer=None, ffn=None, num_norms=0)


def shapes_of(text: str, *, recompute: Recompute = Recompute.NONE) -> Shapes:
    """Shapes on 8 devices; recompute may hold bits that no plan text combines."""
    where = context(small_model(), 8, global_batch=8)
    one = replace(plan(where, text), recompute=recompute)
    return block_shapes(where.machine, where.job, PlanTable.from_plans([one]))


def memory(kind: LayerKind, text: str, *, recompute: Recompute = Recompute.NONE, ratio: float = 1.0) -> BlockMemory:
    """One layer of hidden size 1024."""
    shapes = shapes_of(text, recompute=recompute)
    shape = dispatched(kind.ffn, shapes, ratio=ratio) if isinstance(kind.ffn, MoeFfn) else None
    return layer_memory(kind=kind, hidden=1024, shapes=shapes, shape=shape)


def dispatched(ffn: MoeFfn, shapes: Shapes, *, ratio: float = 1.0) -> DispatchShape:
    where = context(small_model(), 8)
    one = np.ones(1)
    return dispatch_shape(where, ffn, shapes, load_ratio=ratio * one, kept_ratio=one)


def attention(text: str, mixer: Attention = MIXER) -> float:
    return float(attention_saved_bytes(mixer, 1024, shapes_of(text))[0])


@pytest.mark.parametrize(
    ("text", "per_token"),
    [
        ("tp=1", 4 * 1024 + 4 + 2 * (16 + 8 + 8 + 16) * 64 + 4 * 16),
        ("tp=2", (4 * 1024 + 4) / 2 + (2 * (16 + 8 + 8 + 16) * 64 + 4 * 16) / 2),
        ("tp=2,sp=0", 4 * 1024 + 4 + (2 * (16 + 8 + 8 + 16) * 64 + 4 * 16) / 2),
        ("cp=4", (4 * 1024 + 4 + 2 * (16 + 8 + 8 + 16) * 64 + 4 * 16) / 4),
        ("mbs=2", 2 * (4 * 1024 + 4 + 2 * (16 + 8 + 8 + 16) * 64 + 4 * 16)),
    ],
)
def test_attention(text: str, per_token: float) -> None:
    """x, norm output and statistic; q, k, v, o and log-sum-exp: split by what the plan splits."""
    assert attention(text) == T * per_token


def test_each_rank_keeps_at_least_one_key_head() -> None:
    """2 key heads over tp 4: one per rank, not half of one."""
    narrow = gqa(16, 2, 64)
    per_token = (4 * 1024 + 4) / 4 + 2 * (4 + 1 + 1 + 4) * 64 + 4 * 4
    assert attention("tp=4", narrow) == T * per_token


def test_query_and_key_norms_keep_their_inputs() -> None:
    """2 x (16 + 8) x 64 bytes per token more, and a statistic for each of the 24 heads, or for queries and for keys."""
    by_head, whole = (replace(MIXER, qk_norm=norm) for norm in (QkNorm.HEAD, QkNorm.WIDTH))
    assert attention("tp=1", by_head) - attention("tp=1") == T * (2 * 24 * 64 + 4 * 24)
    assert attention("tp=1", whole) - attention("tp=1") == T * (2 * 24 * 64 + 4 * 2)
    assert attention("tp=2", by_head) - attention("tp=2") == T * (2 * 24 * 64 + 4 * 24) / 2


def test_low_rank_queries_keep_their_latent() -> None:
    """Latent and its norm's output: 2 x 2 x 256 bytes per token, tokens split by sequence parallelism."""
    low = replace(MIXER, q_lora_rank=256)
    assert attention("tp=1", low) - attention("tp=1") == T * 4 * 256
    assert attention("tp=2", low) - attention("tp=2") == T / 2 * 4 * 256


@pytest.mark.parametrize("tp", [1, 8])
def test_latent_attention(tp: int) -> None:
    """Local tokens: x, norm output, both latents with their norms, the rope part; heads: q, k, v, o, log-sum-exp."""
    local = 4 * 1024 + 4 + 4 * 1536 + 4 * 512 + 2 * 64
    heads = 128 * (2 * (192 + 192 + 128 + 128) + 4)
    assert attention(f"tp={tp}", V3_ATTENTION) == T * (local + heads) / tp
    assert mla_up_projected_bytes(V3_ATTENTION, shapes_of(f"tp={tp}")) == T * 2 * 128 * (192 + 192 + 128) / tp


@pytest.mark.parametrize(("gated", "inner"), [(True, 6), (False, 4)])
def test_dense_layer(gated: bool, inner: int) -> None:
    """4h + 4 and 6f (gated) or 4f per token beside attention; tp splits both under sequence parallelism."""
    kind = LayerKind(mixer=None, ffn=DenseFfn(width=2048, gated=gated))
    assert memory(kind, "tp=1").saved == T * (4 * 1024 + 4 + inner * 2048)
    assert memory(kind, "tp=2").saved == T / 2 * (4 * 1024 + 4 + inner * 2048)
    assert memory(kind, "tp=2,sp=0").saved == T * (4 * 1024 + 4 + inner * 2048 / 2)


MOE = MoeFfn(num_experts=8, top_k=2, expert_width=512)
MOE_LAYER = LayerKind(mixer=None, ffn=MOE)


@pytest.mark.parametrize("text", ["ep=1", "ep=8", "ep=8,dispatcher=allgather", "ep=8,dispatcher=deepep"])
def test_moe_layer_saves_the_same_at_every_ep(text: str) -> None:
    """4h + 4 + 8 x 8 (logits, scores) per token; 2 copies of 2h + 6 x 512 + 4."""
    assert memory(MOE_LAYER, text).saved == T * (4 * 1024 + 4 + 64 + 2 * (2 * 1024 + 6 * 512 + 4))


def test_moe_layer_with_expert_tensor_parallelism() -> None:
    """etp 2: twice the copies, each with half of the inner width."""
    per_copy = 2 * 1024 + 6 * 256 + 4
    assert memory(MOE_LAYER, "ep=4,etp=2").saved == T * (4 * 1024 + 4 + 64 + 4 * per_copy)


def test_busiest_rank_saves_its_own_copies() -> None:
    """1.5 times the mean: half of the 2 copies more."""
    more = memory(MOE_LAYER, "ep=8", ratio=1.5).saved - memory(MOE_LAYER, "ep=8").saved
    assert more == T * (2 * 1024 + 6 * 512 + 4)


def test_shared_experts_and_latent_experts() -> None:
    """Shared experts of 256: 6 x 256 more, with a gate their output and one number too. A latent width of 128: copies
    of 2 x 128; the projection back keeps its input of 2 x 128, the other one's output nobody keeps.
    """
    shared = memory(LayerKind(mixer=None, ffn=replace(MOE, shared_width=256)), "tp=1")
    assert shared.saved - memory(MOE_LAYER, "tp=1").saved == T * 6 * 256
    gated = memory(LayerKind(mixer=None, ffn=replace(MOE, shared_width=256, shared_gate=True)), "tp=1")
    assert gated.saved - shared.saved == T * 2 * (1024 + 1)
    latent = memory(LayerKind(mixer=None, ffn=replace(MOE, latent_width=128)), "tp=1")
    assert memory(MOE_LAYER, "tp=1").saved - latent.saved == T * (2 * 2 * (1024 - 128) - 2 * 128)


def test_norms_after_the_blocks_keep_their_inputs() -> None:
    """Two norms more than usual: 2h + 4 each."""
    sandwiched = replace(DENSE, num_norms=4)
    assert memory(sandwiched, "tp=1").saved - memory(DENSE, "tp=1").saved == T * 2 * (2 * 1024 + 4)


def test_a_linear_mixer_saves_its_projections() -> None:
    mixer = LinearMixer(name="scan", in_width=3000, out_width=1000, small_params=0, scan_flops_per_token=0, heads=8)
    kind = LayerKind(mixer=mixer, ffn=None, num_norms=1)
    assert memory(kind, "tp=2").saved == T / 2 * (4 * 1024 + 4 + 2 * 4000)


def test_an_empty_layer_saves_nothing() -> None:
    assert memory(NOTHING, "tp=1").saved == 0


MLA_LAYER = LayerKind(mixer=V3_ATTENTION, ffn=replace(MOE, shared_width=256))


@pytest.mark.parametrize(
    ("kind", "module", "freed"),
    [
        (DENSE, Recompute.CORE_ATTN, 4 * 16),
        (DENSE, Recompute.MLP, 6 * 2048 + 2 * 1024),
        (DENSE, Recompute.LAYERNORM, 0),
        (DENSE, Recompute.MLA_UP_PROJ, 0),
        (DENSE, Recompute.MOE, 0),
        (MOE_LAYER, Recompute.MOE_ACT, 2 * 2 * 512),
        (MOE_LAYER, Recompute.LAYERNORM, 2 * 1024),
        (MOE_LAYER, Recompute.MOE, 64 + 2 * (2 * 1024 + 6 * 512 + 4)),
        (MLA_LAYER, Recompute.LAYERNORM, 2 * 2 * 1024),
        (MLA_LAYER, Recompute.MLA_UP_PROJ, 2 * 128 * (192 + 192 + 128)),
        (MLA_LAYER, Recompute.SHARED_EXPERTS, 6 * 256),
        (MLA_LAYER, Recompute.MOE, 64 + 2 * (2 * 1024 + 6 * 512 + 4) + 6 * 256),
        (
            MLA_LAYER,
            Recompute.MOE | Recompute.MOE_ACT | Recompute.SHARED_EXPERTS,
            64 + 2 * (2 * 1024 + 6 * 512 + 4) + 6 * 256,
        ),
        (MLA_LAYER, Recompute.MOE_ACT | Recompute.LAYERNORM, 2 * 2 * 512 + 2 * 2 * 1024),
    ],
)
def test_bytes_per_token_that_recompute_frees(kind: LayerKind, module: Recompute, freed: int) -> None:
    """And the same comes back for the one layer whose backward runs (dispatch state with it where it was dropped)."""
    plain, again = memory(kind, "tp=1"), memory(kind, "tp=1", recompute=module)
    assert plain.saved - again.saved == T * freed
    assert again.saved + again.dispatch_state + again.recomputed == plain.saved + plain.dispatch_state


@pytest.mark.parametrize("kind", [DENSE, MLA_LAYER])
@pytest.mark.parametrize("text", ["tp=1", "tp=2", "tp=2,sp=0"])
def test_full_recompute_keeps_the_input_only(kind: LayerKind, text: str) -> None:
    full = memory(kind, text, recompute=Recompute.FULL)
    assert full.saved == shapes_of(text).local_tokens * 2 * 1024
    assert full.dispatch_state == 0


def test_live_gradients_of_attention_hold_the_ring() -> None:
    """2 x (16 x (64 + 64) + 8 x (64 + 64) cp) x 4096/cp and the layer's input gradient, if wider than the rest."""
    kind = LayerKind(mixer=MIXER, ffn=None)
    for cp in (1, 4):
        live = 2 * (16 * 128 + 8 * 128 * cp) + 2 * 1024
        assert memory(kind, f"cp={cp}").transient == T / cp * live


def test_embedding_and_head() -> None:
    """8 bytes of ids per token; the final norm's input and output 4h + 4 on local tokens, and labels."""
    shapes = shapes_of("tp=2")
    assert embedding_memory(shapes).saved == T * 8
    assert head_memory(hidden=1024, shapes=shapes).saved == T / 2 * (4 * 1024 + 4) + T * 8


def test_mtp_module_saves_its_layer_both_inputs_and_its_norm() -> None:
    """Beside the layer 12h + 12 on local tokens, and shifted labels."""
    shapes, layer = shapes_of("tp=2"), memory(DENSE, "tp=2")
    module = mtp_memory(hidden=1024, shapes=shapes, layer=layer)
    assert module.saved - layer.saved == T / 2 * (12 * 1024 + 12) + T * 8
    assert module.recomputed == layer.recomputed


def test_logits_and_softmax() -> None:
    """1000 tokens, 4096 columns over tp 2: 6 bytes, 10 with a copy in fp32, 4 of softmax; twice with an MTP module."""
    case = {"tokens": 1000, "vocab": 4096, "tp": 2}
    assert logits_bytes(**case, depths=1, per_logit_bytes=6) == 1000 * 2048 * 6
    assert logits_bytes(**case, depths=2, per_logit_bytes=10) == 2 * 1000 * 2048 * 10
    assert softmax_bytes(**case, depths=1) == 1000 * 2048 * 4


def test_dispatch_state_of_a_micro_batch() -> None:
    """Map 8 bytes per token, 12 per copy, and splits of 8 (2 x 8 + 8)."""
    shape = dispatched(MOE, shapes_of("ep=8"))
    assert dispatch_state_bytes(shape) == T * 8 + 2 * T * 12 + 8 * 24


@pytest.mark.parametrize(
    ("dispatcher", "tokens"),
    [
        ("alltoall", 2 + 2 * 2 * 1.5),
        ("allgather", 8 * (1 + 2) + 2 * 1.5),
        ("deepep", 2 * 1.5 + 2 * 1.5),
        ("hybridep", 2 * 1.5 + 2 * 1.5),
    ],
)
def test_live_dispatch_buffers(dispatcher: str, tokens: float) -> None:
    """Copies sent and received and the experts' output; 8 ranks' tokens, and again in fp32; distinct tokens: top-2 of 8
    goes to 2 ranks.

    The busiest rank receives 1.5 times the mean.
    """
    shape = dispatched(MOE, shapes_of(f"ep=8,dispatcher={dispatcher}"), ratio=1.5)
    assert dispatch_transient_bytes(shape) == pytest.approx(tokens * T * 2 * 1024, rel=1e-12)


def test_fixed_buffers_of_deepep() -> None:
    """Size hints of DeepEP at hidden 7168: 335,709,824 bytes in a domain, 377,677,824 + 336,047,360 across."""
    for dispatcher, group, domains, size in (
        (Dispatcher.DEEPEP, 8, 1, 335_709_824),
        (Dispatcher.DEEPEP, 64, 8, 377_677_824 + 336_047_360),
        (Dispatcher.DEEPEP, 1, 1, 0),
        (Dispatcher.ALLTOALL, 64, 8, 0),
    ):
        found = dispatcher_buffer_bytes(dispatcher=int(dispatcher), hidden=7168, group=group, domains=domains)
        assert found == pytest.approx(size, abs=1)


def test_stage_holds_a_micro_batch_per_stage_below_it() -> None:
    """1f1b on 4 stages: stage 1 has 3 in flight; its dispatch state counts as often."""
    where = context(small_model(mtp_layers=0), 4, global_batch=8)
    answer = price(where, "pp=4")
    costs = block_costs(where, PlanTable.from_plans([answer.plan]), (-1, 0))
    layer, stage = costs.memories[1], answer.memory.stages[1]
    assert stage.moment == "backward"
    assert stage.activations_bytes == 3 * 2 * layer.saved + layer.recomputed + layer.transient
    assert stage.dispatch_bytes == 3 * 2 * layer.dispatch_state + layer.dispatch_transient


def test_gpipe_keeps_the_softmax_of_every_micro_batch() -> None:
    """8 micro-batches of 4096 x 4096 logits: 1f1b holds 6 bytes per logit once, gpipe 7 x 4 bytes more."""
    where = context(small_model(mtp_layers=0), 2, global_batch=8)
    logits = T * 4096
    early, late = (price(where, f"pp=2,schedule={schedule}").memory.stages[-1] for schedule in ("1f1b", "gpipe"))
    assert early.moment == "head_and_loss"
    assert early.logits_bytes == 6 * logits
    assert late.logits_bytes - 7 * 4 * logits in (0, 6 * logits)
