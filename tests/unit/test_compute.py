"""Compute kernels on round figures, worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from ap_search.cost.compute import (
    attended_pairs,
    attention_core_time_s,
    elementwise_time_s,
    gemm_time_s,
    gemm_weight_gradient_time_s,
)
from ap_search.cost.experts import expert_time
from ap_search.cost.linear import Gemm, Rates, linear_time
from ap_search.cost.mixer import projections
from ap_search.cost.moe import dispatch_shape
from ap_search.cost.shapes import Shapes, block_shapes
from ap_search.plan.table import PlanTable
from ap_search.spec.blocks import Attention, MoeFfn
from ap_search.spec.job import Precision
from ap_search.spec.machine import AttentionFit, GemmFit
from tests.cost_cases import V3_ATTENTION, context, gqa, plan, round_machine, small_model

PEAK, HBM = 1e15, 1e12
IDEAL = GemmFit(efficiency_ratio=1.0, hbm_efficiency_ratio=1.0, launch_s=0.0, wgrad_ratio=1.0)
GROUPED = round_machine().grouped_gemm


def gemm(fit: GemmFit, m: float, n: float, k: float) -> float:
    return float(gemm_time_s(fit, peak_flops_per_s=PEAK, hbm_bytes_per_s=HBM, m=m, n=n, k=k))


def weight_gradient(fit: GemmFit, m: float, n: float, k: float) -> float:
    return float(gemm_weight_gradient_time_s(fit, peak_flops_per_s=PEAK, hbm_bytes_per_s=HBM, m=m, n=n, k=k))


def test_gemm_bound_by_compute() -> None:
    """2 x 10,000^3 = 2e12 FLOPs: 2 ms at the peak; half the efficiency and 1 ms per launch make it 5 ms."""
    assert gemm(IDEAL, 1e4, 1e4, 1e4) == pytest.approx(2e-3)
    assert gemm(replace(IDEAL, efficiency_ratio=0.5, launch_s=1e-3), 1e4, 1e4, 1e4) == pytest.approx(5e-3)


def test_gemm_bound_by_memory() -> None:
    """One row: 2 (10^4 + 10^8 + 10^4) bytes, 0.20004 ms; at half the memory efficiency twice that."""
    assert gemm(IDEAL, 1, 1e4, 1e4) == pytest.approx(2.0004e-4)
    assert gemm(replace(IDEAL, hbm_efficiency_ratio=0.5), 1, 1e4, 1e4) == pytest.approx(4.0008e-4)


def test_weight_gradient_reaches_a_share_and_moves_fp32() -> None:
    """2e12 FLOPs at 0.8 of the peak: 2.5 ms. One row: 2 (10^4 + 10^4) + 8 x 10^8 bytes: 0.80004 ms."""
    assert weight_gradient(replace(IDEAL, wgrad_ratio=0.8), 1e4, 1e4, 1e4) == pytest.approx(2.5e-3)
    assert weight_gradient(IDEAL, 1, 1e4, 1e4) == pytest.approx(8.0004e-4)


def test_chain_of_linear_layers() -> None:
    """Two GEMMs of 2e12 FLOPs: 4 ms forward, as much for inputs and for weights."""
    rates = Rates.of(round_machine(), Precision.BF16)
    time = linear_time(rates, (Gemm(m=1e4, n=1e4, k=1e4), Gemm(m=1e4, n=2e4, k=5e3)))
    assert (time.forward_s, time.input_grad_s, time.weight_grad_s) == pytest.approx((4e-3, 4e-3, 4e-3))
    assert time.backward_s == pytest.approx(8e-3)


@pytest.mark.parametrize("precision", [Precision.FP8, Precision.MXFP8])
def test_fp8_has_a_peak_of_its_own(precision: Precision) -> None:
    assert Rates.of(round_machine(), precision).peak_flops_per_s == 2e15


@pytest.mark.parametrize(
    ("seq_len", "window", "pairs"),
    [(4096, 0, 8_388_608), (4096, 4096, 8_388_608), (4096, 8192, 8_388_608), (4096, 128, 128 * 4096 - 8192)],
)
def test_attended_pairs(seq_len: int, window: int, pairs: int) -> None:
    """Half of the square, or a band of the window less its corner."""
    assert attended_pairs(seq_len, window) == pairs


def core(**changes: float) -> float:
    given = {"sequences": 1, "heads": 100, "seq_len": 1000, "cp": 1, "qk_head_dim": 156, "v_head_dim": 100, "window": 0}
    return float(attention_core_time_s(round_machine(), **{**given, **changes}))


def test_attention_core() -> None:
    """2 x 100 heads x 500,000 pairs x (156 + 100) = 2.56e10 FLOPs: 25.6 us at the peak."""
    assert core() == pytest.approx(2.56e-5)
    assert core(sequences=3) == pytest.approx(7.68e-5)
    assert core(cp=4) == pytest.approx(6.4e-6)
    assert core(window=100) == pytest.approx(2.56e-5 * (100 * 1000 - 5000) / 500_000)


def test_narrow_heads_wait_for_exponentials() -> None:
    """Mean widths of 64 and 128: twice the work at 182.5/118.5/2 = 0.77 of the efficiency; nothing is won beyond 128.

    Source: FlashAttention-3, arXiv 2407.08608, figure 5: 473 and 616 TFLOP/s are 0.77 of one another.
    """
    wide, narrow = core(qk_head_dim=128, v_head_dim=128), core(qk_head_dim=64, v_head_dim=64)
    assert wide / narrow == pytest.approx(2 * 182.5 / 118.5 / 2)
    assert wide / narrow == pytest.approx(2 * 473 / 616, rel=0.01)
    assert core(qk_head_dim=256, v_head_dim=256) == pytest.approx(2 * wide)


def test_attention_core_falls_short_for_short_sequences_and_little_work() -> None:
    """0.5 x s/(s + s0) x u/(u + w0): s = s0 and u = 100 heads x 8 tiles/100 = 8 = w0 halve it each; 1 us launch."""
    fit = AttentionFit(efficiency_ratio=0.5, seq_half=1000, work_half=8, launch_s=1e-6, backward_time_ratio=2.5)
    machine = round_machine(attention=fit)
    time = attention_core_time_s(
        machine, sequences=1, heads=100, seq_len=1000, cp=1, qk_head_dim=156, v_head_dim=100, window=0
    )
    assert time == pytest.approx(8 * 2.56e-5 + 1e-6)


def test_elementwise_operators_stream() -> None:
    """8e9 bytes at 0.8 of 1e12 bytes/s: 10 ms."""
    assert elementwise_time_s(round_machine(), 0.8, 8e9) == pytest.approx(1e-2)


def shapes_of(text: str) -> Shapes:
    where = context(small_model(), 8, global_batch=8)
    return block_shapes(where.machine, where.job, PlanTable.from_plans([plan(where, text)]))


def multiply_adds(gemms: tuple[Gemm, ...]) -> float:
    return float(sum(np.sum(np.asarray(gemm.m * gemm.n * gemm.k)) for gemm in gemms))


def check_projections(attention: Attention, params: int) -> None:
    """Multiply-adds of one token on one device are the projections' parameters; norms of latents are not products."""
    up, other = projections(attention, 1024, shapes_of("tp=1"))
    assert multiply_adds(up) + multiply_adds(other) == 4096 * params


def test_projections_multiply_every_weight_once() -> None:
    """16 heads of 64 over hidden 1024: q, o 1024^2 each, k and v half of it; variants count like their parameters."""
    square = 1024 * 1024
    check_projections(gqa(16, 8, 64), 3 * square)
    check_projections(gqa(16, 8, 64, output_gate=True), 4 * square)
    check_projections(gqa(16, 8, 64, key_is_value=True), 3 * square - square // 2)
    check_projections(gqa(16, 8, 64, kv_from_below=True), 2 * square)
    check_projections(gqa(16, 8, 64, q_lora_rank=256), 2 * square + 2 * 256 * 1024)
    latent = 1024 * (1536 + 512 + 64) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 1024
    check_projections(V3_ATTENTION, latent)


def test_down_projections_run_on_local_tokens() -> None:
    """tp 4: whole down-projections on a quarter of the tokens, a quarter of the other matrices on all of them."""
    whole, split = (sum(map(multiply_adds, projections(V3_ATTENTION, 1024, shapes_of(f"tp={tp}")))) for tp in (1, 4))
    assert split == whole / 4
    replicated = sum(map(multiply_adds, projections(V3_ATTENTION, 1024, shapes_of("tp=4,sp=0"))))
    assert replicated == whole / 4 + 0.75 * 4096 * 1024 * (1536 + 512 + 64)


@pytest.mark.parametrize("text", ["ep=1", "ep=2", "ep=8", "tp=2,ep=4,etp=2", "tp=2,ep=8"])
def test_balanced_expert_work_of_a_rank_does_not_depend_on_ep(text: str) -> None:
    """Each of the ep ranks brings its own tokens: rows x inner width is tokens x top-k x width/tp in any case."""
    machine = round_machine(grouped_gemm=replace(GROUPED, hbm_efficiency_ratio=1e9), hbm_bytes_per_s=1e21)
    where = context(small_model(), 8, machine=machine, global_batch=8)
    shapes = block_shapes(machine, where.job, PlanTable.from_plans([plan(where, text)]))
    ffn = MoeFfn(num_experts=8, top_k=2, expert_width=512)
    shape = dispatch_shape(where, ffn, shapes, load_ratio=np.ones(1), kept_ratio=np.ones(1))
    time = expert_time(where, ffn, shape)
    flops = 2.0 * 4096 * 2 * 3 * 1024 * 512 / shapes.tp
    assert time.forward_s == pytest.approx(flops / PEAK, rel=1e-6)
    assert time.input_grad_s == pytest.approx(flops / PEAK, rel=1e-6)
    assert time.weight_grad_s == pytest.approx(flops / PEAK, rel=1e-6)
