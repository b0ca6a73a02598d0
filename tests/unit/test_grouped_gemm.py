"""Grouped GEMMs by hand: FLOPs, bytes, tiles and waves, padding, the efficiency of few rows."""

from dataclasses import replace

import numpy as np
import pytest

from ap_search.cost.experts import expert_time
from ap_search.cost.grouped_gemm import (
    GroupedGemm,
    GroupedRates,
    aligned_rows,
    grouped_gemm_bytes,
    grouped_gemm_flops,
    grouped_gemm_time_s,
    grouped_gemm_weight_gradient_time_s,
)
from ap_search.cost.moe import dispatch_shape
from ap_search.cost.shapes import block_shapes
from ap_search.plan.table import PlanTable
from ap_search.spec.blocks import MoeFfn
from ap_search.spec.cluster import load_cluster
from ap_search.spec.job import Precision
from ap_search.spec.machine import GroupedGemmFit, TileFit
from tests.cost_cases import context, plan, round_machine, small_model

FIT = round_machine().grouped_gemm
FAST_MEMORY = replace(FIT, hbm_efficiency_ratio=1e6)
TILED = replace(FAST_MEMORY, tile=TileFit(overhead_width=0.0, small_tile_exponent=1.0))
MOE = MoeFfn(num_experts=8, top_k=2, expert_width=512)


def rates(fit: GroupedGemmFit, *, operand_bytes: int = 2) -> GroupedRates:
    """1e15 FLOP/s, 1e12 bytes/s, 100 multiprocessors: 1e13 FLOP/s each."""
    return GroupedRates(fit=fit, peak_flops_per_s=1e15, hbm_bytes_per_s=1e12, sm_count=100, operand_bytes=operand_bytes)


def seconds(fit: GroupedGemmFit, experts: float, rows: float, n: float, k: float) -> float:
    return float(grouped_gemm_time_s(rates(fit), GroupedGemm(experts=experts, rows=rows, n=n, k=k)))


def test_flops_and_bytes() -> None:
    """4 experts, 100 rows in all, k 10, n 20: 2 x 100 x 20 x 10; inputs 1000, weights 4 x 200, outputs 2000."""
    gemm = GroupedGemm(experts=4, rows=100, n=20, k=10)
    assert grouped_gemm_flops(gemm) == 40_000
    assert grouped_gemm_bytes(gemm, operand_bytes=2) == 2 * (1000 + 800) + 2 * 2000
    assert grouped_gemm_bytes(gemm, operand_bytes=1) == 1800 + 4000


@pytest.mark.parametrize(("alignment", "total"), [(16, 688), (32, 736), (128, 896)])
def test_rows_are_padded_to_whole_multiples(alignment: int, total: int) -> None:
    """Segments of 100, 128, 129, 300 rows."""
    assert aligned_rows(np.array([100, 128, 129, 300]), alignment).sum() == total


def test_compute_and_memory_are_joined() -> None:
    """10 experts, 10,000 rows, n = k = 10^4: 2 ms of compute, 2 (2 x 10^8 + 10^9) bytes = 2.4 ms of memory, 4-norm."""
    assert seconds(FIT, 10, 1e4, 1e4, 1e4) == pytest.approx((2e-3**4 + 2.4e-3**4) ** 0.25)


def test_few_rows_per_expert_are_slow() -> None:
    """Half of the plateau at `rows_half` rows per expert; memory left out by a fast one."""
    fit = replace(FAST_MEMORY, rows_half=1000.0)
    assert seconds(fit, 10, 1e4, 1e4, 1e4) == pytest.approx(4e-3, rel=1e-6)
    assert seconds(fit, 1, 1e4, 1e4, 1e4) == pytest.approx(2e-3 * 1.1, rel=1e-6)


@pytest.mark.parametrize("fit", [FIT, replace(FIT, tile=TILED.tile)], ids=["saturation", "tiles"])
def test_no_rows_take_the_time_of_the_weights_only(fit: GroupedGemmFit) -> None:
    """10 experts of 10^8 elements are read all the same: 2 ms."""
    assert seconds(fit, 10, 0, 1e4, 1e4) == pytest.approx(2e-3)


def test_a_wave_is_as_long_as_its_tiles() -> None:
    """100 multiprocessors do 100 tiles of 128 x 256 at once: 2 x 32768 x 1000 FLOPs at 1e13 each, 6.5536 us; the 101st
    tile starts a second wave, unless smaller tiles fit better.
    """
    wave = 2 * 32768 * 1000 / 1e13
    assert seconds(TILED, 1, 128 * 10, 256 * 10, 1000) == pytest.approx(wave, rel=1e-6)
    assert seconds(TILED, 1, 128 * 10 + 1, 256 * 10, 1000) == pytest.approx(2 * wave, rel=1e-6)


def test_rows_fill_tiles_expert_by_expert() -> None:
    """200 experts with one row each take as many tiles as 200 with 64: efficiency of the smallest tile, 8192/32768."""
    smallest = 2 * 8192 * 1000 / (1e13 * 8192 / 32768)
    assert seconds(TILED, 200, 200, 128, 1000) == pytest.approx(2 * smallest, rel=1e-6)
    assert seconds(TILED, 200, 200 * 64, 128, 1000) == pytest.approx(2 * smallest, rel=1e-6)


def test_starting_a_tile_costs_inner_width() -> None:
    """With k0 = 1000 a product over k = 1000 takes twice as long, over 3000 a third more."""
    fit = replace(TILED, tile=TileFit(overhead_width=1000.0, small_tile_exponent=1.0))
    for k, more in ((1000, 2.0), (3000, 4 / 3)):
        assert seconds(fit, 1, 1280, 2560, k) == pytest.approx(more * seconds(TILED, 1, 1280, 2560, k), rel=1e-6)


def test_more_rows_are_never_faster() -> None:
    """On every measured device, in both precisions, whatever the tiles."""
    rows = np.arange(1, 4000, 7, dtype=np.float64)
    for name in ("h100-sxm", "b200-sxm", "a100-80-sxm"):
        machine = load_cluster(name)
        for fit in (machine.grouped_gemm, machine.grouped_gemm_fp8):
            with_sms = replace(rates(fit), sm_count=machine.sm_count)
            gemm = GroupedGemm(experts=4.0, rows=4 * rows, n=4096.0, k=7168.0)
            assert (np.diff(grouped_gemm_time_s(with_sms, gemm)) >= 0).all()
            assert (np.diff(grouped_gemm_weight_gradient_time_s(with_sms, gemm)) >= 0).all()


def test_weight_gradient_depends_on_rows() -> None:
    """The ratio goes from 0.5 at 100 rows per expert to 1 at 1000: 0.75 half-way, 550 rows."""
    rows, ratios = np.array([100.0, 550.0, 1000.0, 5000.0]), np.array([0.5, 0.75, 1.0, 1.0])
    known = {"wgrad_rows": (100.0, 1000.0), "wgrad_ratios": (0.5, 1.0)}
    gemm = GroupedGemm(experts=1.0, rows=rows, n=1e4, k=1e4)
    time = grouped_gemm_weight_gradient_time_s(rates(replace(FAST_MEMORY, **known)), gemm)  # type: ignore[arg-type]
    assert time == pytest.approx(2e8 * rows / 1e15 / ratios, rel=1e-6)
    tiles = GroupedGemm(experts=1.0, rows=rows, n=1280.0, k=2560.0)
    time = grouped_gemm_weight_gradient_time_s(rates(replace(TILED, **known)), tiles)  # type: ignore[arg-type]
    assert time == pytest.approx(2 * 1280 * 2560 * rows / 1e15 / ratios, rel=1e-6)


def test_weight_gradient_reads_and_writes_fp32() -> None:
    """10 experts of (10^4, 10^4) without rows: 8 bytes for each of 10^9 elements."""
    gemm = GroupedGemm(experts=10, rows=0, n=1e4, k=1e4)
    assert float(grouped_gemm_weight_gradient_time_s(rates(FIT), gemm)) == pytest.approx(8e-3)
    few = GroupedGemm(experts=10, rows=100, n=1e4, k=1e4)
    free = replace(rates(FIT), peak_flops_per_s=1e30)
    assert float(grouped_gemm_weight_gradient_time_s(free, few)) == pytest.approx((4e6 + 8e9) / 1e12)


def forward_s(text: str, **job: object) -> float:
    machine = round_machine(grouped_gemm_fp8=FIT)
    where, one = context(small_model(), 8, machine=machine, global_batch=8, **job), np.ones(1)
    shapes = block_shapes(machine, where.job, PlanTable.from_plans([plan(where, text)]))
    shape = dispatch_shape(where, MOE, shapes, load_ratio=one, kept_ratio=one)
    return float(np.asarray(expert_time(where, MOE, shape).forward_s)[0])


def test_experts_pad_their_rows_in_fp8_unless_the_dispatcher_does() -> None:
    """Two copies of 8192 + 7.5 rows of 1024, read and written in bf16, at 0.8 of 1e12 bytes/s."""
    copied, fused = (forward_s(f"ep=8,dispatcher={name}", precision=Precision.FP8) for name in ("deepep", "hybridep"))
    assert copied - fused == pytest.approx(2 * 2 * 2 * (8192 + 7.5) * 1024 / 0.8e12)
    plain = [forward_s(f"ep=8,dispatcher={name}") for name in ("deepep", "hybridep")]
    assert plain[0] == plain[1]


@pytest.mark.parametrize(
    ("precision", "rows"), [(Precision.BF16, 0.0), (Precision.FP8, 2 * 7.5), (Precision.MXFP8, 2 * 15.5)]
)
def test_alignment_adds_rows_per_expert(precision: Precision, rows: float) -> None:
    """ep 4: two local experts, each padded by half of what alignment can add."""
    where, one = context(small_model(), 8, global_batch=8, precision=precision), np.ones(1)
    shapes = block_shapes(where.machine, where.job, PlanTable.from_plans([plan(where, "ep=4")]))
    shape = dispatch_shape(where, MOE, shapes, load_ratio=one, kept_ratio=one)
    assert shape.padding_rows == rows
    assert shape.aligned_rows == 4096 * 2 + rows
    assert replace(shape, padded_capacity=np.full(1, 1024.0)).padding_rows == 0.0
