"""One MoE layer on 8 H100: forward and backward of twelve measured rows, with the constants of the shipped preset.

Source: NVIDIA/Megatron-LM d98e8a64, `tests/functional_tests/test_cases/common/moe_perf/baseline.json` and `__main__.py`
(recorded December 2025): ep 8 in one node, tp 1, 4096 tokens per rank, forced balance, fused permutation and router,
mean of 20 iterations. Mixtral's proxy: 8 experts, top-2, hidden 4096, width 14336. DeepSeek's: 32 experts in 8 groups
of which 4 are kept, top-8, hidden 7168, width 2048, a shared expert of width 2048. fp8 is blockwise.

The benchmark runs one layer behind a long product, so the host is ahead and clocks are those of single kernels: the
device's `sustained_ratio`, which is about whole training runs, is 1 here, and host times are 0. All else is as shipped.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pytest

from ap_search.cost.grouped_gemm import (
    GroupedGemm,
    GroupedRates,
    grouped_gemm_bytes,
    grouped_gemm_flops,
    grouped_gemm_time_s,
)
from ap_search.cost.moe import dispatch_shape, moe_time
from ap_search.cost.shapes import block_shapes
from ap_search.plan.table import PlanTable
from ap_search.spec.blocks import LayerKind, MoeFfn
from ap_search.spec.cluster import load_cluster
from ap_search.spec.job import Precision
from ap_search.spec.profiles import load_software
from ap_search.spec.software import Software
from tests.cost_cases import context, gqa, model, plan

MIXTRAL = (4096, MoeFfn(num_experts=8, top_k=2, expert_width=14336))
DEEPSEEK = (
    7168,
    MoeFfn(num_experts=32, top_k=8, expert_width=2048, shared_width=2048, num_groups=8, topk_groups=4),
)
BF16, FP8 = Precision.BF16, Precision.FP8

# Proxy, dispatcher, precision, forward and backward in milliseconds.
ROWS = (
    (MIXTRAL, "alltoall", BF16, 4.327, 7.684),
    (MIXTRAL, "deepep", BF16, 4.636, 7.854),
    (MIXTRAL, "hybridep", BF16, 4.343, 7.741),
    (DEEPSEEK, "alltoall", BF16, 7.119, 10.483),
    (DEEPSEEK, "deepep", BF16, 5.682, 9.055),
    (DEEPSEEK, "hybridep", BF16, 5.391, 8.795),
    (MIXTRAL, "alltoall", FP8, 3.788, 6.618),
    (MIXTRAL, "deepep", FP8, 4.101, 6.827),
    (MIXTRAL, "hybridep", FP8, 3.701, 6.572),
    (DEEPSEEK, "alltoall", FP8, 7.609, 10.126),
    (DEEPSEEK, "deepep", FP8, 6.035, 8.602),
    (DEEPSEEK, "hybridep", FP8, 5.143, 7.687),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Seconds of one layer's forward and backward."""

    forward_s: float
    backward_s: float


@lru_cache
def single_layer_software() -> Software:
    return replace(
        load_software("megatron-core"), compute_efficiency_ratio=1.0, host_per_layer_s=0.0, host_per_moe_layer_s=0.0
    )


def layer(proxy: tuple[int, MoeFfn], dispatcher: str, precision: Precision) -> Passes:
    hidden, moe = proxy
    one_layer = model("proxy", hidden, 32000, [LayerKind(mixer=gqa(8, 8), ffn=moe)])
    where = context(
        one_layer,
        8,
        machine=replace(load_cluster("h100-sxm"), sustained_ratio=1.0),
        software=single_layer_software(),
        precision=precision,
        global_batch=8,
        seq_len=4096,
    )
    table = PlanTable.from_plans([plan(where, f"ep=8,dispatcher={dispatcher}")])
    shapes, one = block_shapes(where.machine, where.job, table), np.ones(1)
    shape = dispatch_shape(where, moe, shapes, load_ratio=one, kept_ratio=one)
    time = moe_time(where, moe, shapes, shape=shape)
    return Passes(forward_s=float(time.forward.sum()), backward_s=float(time.backward.sum()))


def name(row: tuple[tuple[int, MoeFfn], str, Precision, float, float]) -> str:
    return f"{'mixtral' if row[0] is MIXTRAL else 'deepseek'}-{row[1]}-{row[2]}"


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_a_layer_takes_what_was_measured(row: tuple[tuple[int, MoeFfn], str, Precision, float, float]) -> None:
    """Within 15 % either way; docs/cost-model/grouped-gemm.md says the error of each row."""
    proxy, dispatcher, precision, forward_ms, backward_ms = row
    passes = layer(proxy, dispatcher, precision)
    assert passes.forward_s * 1e3 == pytest.approx(forward_ms, rel=0.15)
    assert passes.backward_s * 1e3 == pytest.approx(backward_ms, rel=0.15)


def test_errors_do_not_lean_to_one_side() -> None:
    """Over all twelve rows, both passes, the mean error is within 5 %."""
    errors = []
    for proxy, dispatcher, precision, forward_ms, backward_ms in ROWS:
        passes = layer(proxy, dispatcher, precision)
        errors += [passes.forward_s * 1e3 / forward_ms - 1, passes.backward_s * 1e3 / backward_ms - 1]
    assert abs(float(np.mean(errors))) < 0.05


def test_the_order_of_dispatchers_is_the_measured_one() -> None:
    """Many copies per token: a copy per expert is slower than one per rank, and fused permutation faster still."""
    for precision in (BF16, FP8):
        alltoall, deepep, hybridep = (
            layer(DEEPSEEK, dispatcher, precision).forward_s for dispatcher in ("alltoall", "deepep", "hybridep")
        )
        assert alltoall > deepep > hybridep


def test_the_published_plateau_of_a_grouped_gemm() -> None:
    """4 experts x 8192 rows, N 4096, K 7168 at 1346 TFLOP/s: 1,924,145,348,608 FLOPs in 1,429.5 us, 434 GB/s.

    Source: deepseek-ai/DeepGEMM README of 2025-04-09, 327ec92 (H800, fp8, contiguous layout). Both its plateaus, at K
    7168 and at K 2048 with N 7168, come out of the preset within 15 %, its launch left out.
    """
    machine = load_cluster("h800-sxm")
    gemm = GroupedGemm(experts=4, rows=4 * 8192, n=4096, k=7168)
    assert grouped_gemm_flops(gemm) == 1_924_145_348_608
    assert grouped_gemm_flops(gemm) / 1346e12 * 1e6 == pytest.approx(1429.5, abs=0.05)
    assert grouped_gemm_bytes(gemm, operand_bytes=1) / 1429.5e-6 / 1e9 == pytest.approx(434, abs=0.5)
    rates = GroupedRates(
        fit=replace(machine.grouped_gemm_fp8, launch_s=0.0),
        peak_flops_per_s=machine.peak_fp8_flops_per_s,
        hbm_bytes_per_s=machine.hbm_bytes_per_s,
        sm_count=machine.sm_count,
        operand_bytes=1,
    )
    for shape, tflops in ((gemm, 1346), (replace(gemm, n=7168, k=2048), 1214)):
        reached = grouped_gemm_flops(shape) / grouped_gemm_time_s(rates, shape) / 1e12
        assert float(reached) == pytest.approx(tflops, rel=0.15)
