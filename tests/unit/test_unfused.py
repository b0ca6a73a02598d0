"""What unfused kernels, dropout, fp8 and per-operator recomputation keep, against published formulas and by hand."""

from dataclasses import replace

import numpy as np
import pytest

from ap_search.cost.activations import layer_memory
from ap_search.cost.keeps import Keeps, keeps_of
from ap_search.cost.operators import operator_saved_bytes
from ap_search.cost.shapes import Shapes, block_shapes
from ap_search.cost.state import ShardDegrees, bucket_bytes, param_bytes
from ap_search.cost.unfused import attention_extra_bytes, dense_extra_bytes, moe_extra_bytes
from ap_search.plan.filled_layout import filled_layout
from ap_search.plan.plan import Sharding
from ap_search.plan.table import PlanTable
from ap_search.spec.blocks import DenseFfn, LayerKind, MoeFfn
from ap_search.spec.job import Precision
from ap_search.spec.profiles import load_software
from ap_search.spec.run import Switches
from ap_search.spec.software import Software
from ap_search.spec.switches import switched
from tests.cost_cases import PLAIN, V3_ATTENTION, context, gqa, llama3_8b, model, plan, price, small_model
from tests.unit.test_activations import dispatched

T = 4096
HIDDEN = 1024
GPT = LayerKind(mixer=gqa(16, 16, 64), ffn=DenseFfn(width=4 * HIDDEN, gated=False))
UNFUSED = Keeps(fused_attention=False, dropout=True)
FP8 = Keeps(fp8_inputs=True)


def shapes_of(text: str) -> Shapes:
    where = context(small_model(), 8, global_batch=8)
    return block_shapes(where.machine, where.job, PlanTable.from_plans([plan(where, text)]))


def saved(kind: LayerKind, text: str, keeps: Keeps) -> float:
    return float(layer_memory(kind, HIDDEN, shapes_of(text), shape=None, keeps=keeps).saved[0])


def test_a_layer_of_2022_keeps_34_sbh_and_5_abss() -> None:
    """Korthikanti et al. 2022, equation 1: s b h (34 + 5 a s / h); two norms keep 4 bytes of statistic per token."""
    assert saved(GPT, "tp=1", UNFUSED) == T * HIDDEN * (34 + 5 * 16 * T / HIDDEN) + T * 8


def test_tensor_parallel_layer_of_2022() -> None:
    """Equation 2 of the same paper, t = 2 without sequence parallelism: s b h (10 + 24/t + 5 a s / (h t))."""
    expected = T * HIDDEN * (10 + 24 / 2 + 5 * 16 * T / (HIDDEN * 2)) + T * 8
    assert saved(GPT, "tp=2,sp=0", UNFUSED) == expected


def test_selective_recomputation_removes_the_scores() -> None:
    """The same paper's equation 6: 34 s b h are left."""
    assert saved(GPT, "recompute=selective:core_attn", UNFUSED) == T * HIDDEN * 34 + T * 8


def test_without_dropout_a_score_keeps_its_softmax_only() -> None:
    extra = attention_extra_bytes(gqa(16, 16, 64), HIDDEN, shapes_of("tp=1"), keeps=Keeps(fused_attention=False))
    assert extra == T * 16 * (2 * T - 4)


def test_a_gate_in_a_kernel_of_its_own_keeps_its_activation() -> None:
    """2f per token; nothing where there is no gate."""
    unfused = Keeps(fused_activation=False)
    assert dense_extra_bytes(DenseFfn(width=2048), HIDDEN, shapes_of("tp=2"), keeps=unfused) == T * 2 * 2048 / 2
    assert dense_extra_bytes(DenseFfn(width=2048, gated=False), HIDDEN, shapes_of("tp=1"), keeps=unfused) == 0


def test_fp8_keeps_one_byte_of_what_only_linear_layers_read() -> None:
    """Attention: h less of the norm, nq dv more beside its output; feed-forward: h and f less."""
    attention = attention_extra_bytes(gqa(16, 8, 64), HIDDEN, shapes_of("tp=1"), keeps=FP8)
    assert attention == T * (16 * 64 - HIDDEN)
    assert dense_extra_bytes(DenseFfn(width=2048), HIDDEN, shapes_of("tp=1"), keeps=FP8) == -T * (HIDDEN + 2048)
    latent = attention_extra_bytes(V3_ATTENTION, HIDDEN, shapes_of("tp=1"), keeps=FP8)
    assert latent == T * 128 * 128, "MLA's norm is a module of its own"


def test_fp8_experts_keep_one_byte_of_their_inputs() -> None:
    """Per copy: h and fe less; shared experts: h more beside the router's, fs less."""
    moe = MoeFfn(num_experts=8, top_k=2, expert_width=512, shared_width=256)
    shapes = shapes_of("ep=8")
    shape = dispatched(moe, shapes)
    extra = moe_extra_bytes(moe, HIDDEN, shapes, shape=shape, keeps=FP8)
    rows = float(np.asarray(shape.aligned_rows)[0])
    assert extra == -rows * (HIDDEN + 512) + T * HIDDEN - T * 256
    unfused = moe_extra_bytes(moe, HIDDEN, shapes, shape=shape, keeps=Keeps(fused_activation=False, dropout=True))
    outside = moe_extra_bytes(moe, HIDDEN, shapes, shape=shape, keeps=Keeps(scores_in_experts=False))
    assert outside == 2 * float(np.asarray(shape.rows)[0]) * HIDDEN
    assert unfused == 2 * rows * 512 + 2 * T * 256 + T * HIDDEN


@pytest.mark.parametrize(("module", "keeps"), [("moe_act", FP8), ("moe_act", Keeps(fused_activation=False))])
def test_recomputed_activations_of_experts_leave_nothing_of_their_own(module: str, keeps: Keeps) -> None:
    """With `moe_act` a copy keeps its input (1 or 2 h), the first product's output (4 fe) and its score (4)."""
    moe = MoeFfn(num_experts=8, top_k=2, expert_width=512)
    shapes = shapes_of(f"ep=8,recompute=selective:{module}")
    shape = dispatched(moe, shapes)
    kind = LayerKind(mixer=None, ffn=moe)
    kept = layer_memory(kind, HIDDEN, shapes, shape=shape, keeps=keeps).saved
    rows = float(np.asarray(shape.aligned_rows)[0])
    each = (1 if keeps.fp8_inputs else 2) * HIDDEN + 4 * 512 + 4
    assert kept == rows * each + T * (4 * HIDDEN + 4 + 8 * 8)


def test_operators_of_a_llama_layer() -> None:
    """Input, w_q, w_v, w_1, w_2 of seven products, attention's output: 2 (3h + 4096 + 1024 + 14336) + 4 x 32 per token.

    h = 4096 each for the layer's input, w_2's output and attention's; query 4096, value 1024, w_1 14336.
    """
    kind = llama3_8b().kinds[0]
    kept = operator_saved_bytes(kind, 4096, shapes_of("tp=1"), shape=None)
    assert kept == T * (2 * (3 * 4096 + 4096 + 1024 + 14336) + 4 * 32)
    memory = layer_memory(
        kind, 4096, shapes_of("recompute=selective:core_attn"), shape=None, keeps=Keeps(per_operator=True)
    )
    everything = layer_memory(kind, 4096, shapes_of("tp=1"), shape=None).saved
    assert memory.saved == kept
    assert memory.recomputed == everything - kept


def test_operators_of_mla_and_of_experts() -> None:
    """q down, kv down, output projection of five; experts' products go, both all-to-alls stay."""
    moe = MoeFfn(num_experts=8, top_k=2, expert_width=512)
    shapes = shapes_of("ep=8")
    shape = dispatched(moe, shapes)
    kept = operator_saved_bytes(LayerKind(mixer=V3_ATTENTION, ffn=moe), HIDDEN, shapes, shape=shape)
    attention = 2 * (HIDDEN + 1536 + 512 + 64 + HIDDEN) + 128 * (2 * 128 + 4)
    assert kept == T * attention + 2 * 2 * HIDDEN * float(np.asarray(shape.rows)[0])


def test_what_a_profile_keeps_depends_on_the_precision() -> None:
    assert keeps_of(PLAIN, Precision.BF16) == Keeps()
    assert keeps_of(PLAIN, Precision.MXFP8).fp8_inputs
    assert not keeps_of(load_software("torchtitan"), Precision.FP8).fp8_inputs


def peaks(software: Software, text: str, *, which: object = None) -> list[int]:
    where = context(which or small_model(mtp_layers=0), 8, global_batch=64)  # type: ignore[arg-type]
    stages = price(replace(where, software=software), text).memory.stages
    return [stage.activations_bytes for stage in stages]


def test_stage_outputs_are_kept_per_micro_batch_in_flight() -> None:
    """2h per token for 4 micro-batches on stage 0, 3 on stage 1, ...; nothing without a pipeline."""
    keeping = replace(PLAIN, keeps_stage_outputs=True)
    more = [kept - plain for kept, plain in zip(peaks(keeping, "pp=4"), peaks(PLAIN, "pp=4"), strict=True)]
    assert more == [T * 2 * HIDDEN * flying for flying in (4, 3, 2, 1)]
    assert peaks(keeping, "pp=1") == peaks(PLAIN, "pp=1")


def test_offloaded_layers_take_their_share_away() -> None:
    """Half of the layers away: half of what layers save; with stages nothing."""
    plain = peaks(PLAIN, "pp=1")[0]
    all_away = peaks(replace(PLAIN, offloaded_layers=8), "pp=1")[0]
    assert peaks(replace(PLAIN, offloaded_layers=4), "pp=1")[0] == pytest.approx((plain + all_away) / 2, abs=1)
    assert peaks(replace(PLAIN, offloaded_layers=4), "pp=2") == peaks(PLAIN, "pp=2")


def test_a_copy_of_gradients_lives_where_they_are_whole() -> None:
    """nanotron: 2 + 4 + 2 + 12/8 bytes; sharded gradients have no copy."""
    nanotron = load_software("nanotron")
    assert param_bytes(nanotron, ShardDegrees(weights=1, gradients=1, optimizer=8)).total == 9.5
    assert param_bytes(nanotron, ShardDegrees(weights=8, gradients=8, optimizer=8)).total == 18 / 8


def test_fp16_runs_keep_20_bytes() -> None:
    """2 weights, 2 gradients, 4 + 4 + 8 in the optimizer, which alone is sharded: 4 + 16/d."""
    fp16 = switched(load_software("megatron-deepspeed"), Switches(half_gradients=True))
    assert param_bytes(fp16, ShardDegrees(weights=1, gradients=1, optimizer=1)).total == 20
    assert param_bytes(fp16, ShardDegrees(weights=1, gradients=1, optimizer=4)).total == 8


def test_fsdp_units_stay_gathered_under_a_pipeline_of_torchtitan() -> None:
    """The whole stage in 16 bits and fp32 gradients, in place of two units."""
    titan = load_software("torchtitan")
    case = {"sharding": Sharding.ZERO3, "params": 1e8, "largest": 1e7, "group": 8}
    assert bucket_bytes(titan, **case, pp=1) == 2e7 * 6
    assert bucket_bytes(titan, **case, pp=4) == 1e8 * 6
    assert bucket_bytes(PLAIN, **case, pp=4) == 2e7 * 6


def test_a_loss_in_pieces_keeps_the_logits_of_one() -> None:
    """A quarter of the logits in four pieces."""
    which = model("wide", HIDDEN, 131072, [GPT])
    where = context(which, 8, global_batch=64)
    whole = price(where, "tp=1").memory.stages[0]
    pieces = price(replace(where, software=replace(PLAIN, loss_chunks=4)), "tp=1").memory.stages[0]
    assert whole.logits_bytes == 6 * T * 131072
    assert pieces.logits_bytes in (0, 6 * T * 131072 // 4)
    assert pieces.total_bytes < whole.total_bytes


def test_filled_stages() -> None:
    """nanotron's 1.34B: 16 layers of 67.1 M, a head of 4 such: half of 20 is passed by the 11th layer.

    Recorded first stages of two hold 10.8 layers' activations (slope of memory over micro-batch size).
    """
    kind = LayerKind(mixer=gqa(32, 32, 64), ffn=DenseFfn(width=8192))
    assert filled_layout(model("1.34b", 2048, 131072, [kind] * 16), 2).stage_layers == (11, 5)
    assert filled_layout(model("small", 2048, 128, [kind] * 16), 4).stage_layers == (5, 4, 4, 3)


def test_full_recomputation_is_the_same_under_every_kernel() -> None:
    """Only the layer's input is kept."""
    kept = layer_memory(GPT, HIDDEN, shapes_of("recompute=full"), shape=None, keeps=UNFUSED)
    assert kept.saved == T * 2 * HIDDEN
