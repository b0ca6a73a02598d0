"""Expert capacity: slots, what is dropped, what is padded; in rows, bytes, time and memory."""

from dataclasses import replace

import numpy as np
import pytest

from ap_search.cost.blocks import BlockCosts, block_costs, kinds_by_load
from ap_search.cost.capacity import expert_capacity, kept_load, kept_ratio, padded_capacity
from ap_search.cost.dispatch import DispatchShape, combine_sent_bytes
from ap_search.cost.moe import dispatch_shape
from ap_search.cost.parts import Part, Wire
from ap_search.cost.shapes import block_shapes
from ap_search.plan.table import PlanTable
from ap_search.spec.blocks import MoeFfn
from ap_search.spec.job import Job, Load
from tests.cost_cases import context, plan, round_machine, small_model

T = 4096
MOE = MoeFfn(num_experts=8, top_k=2, expert_width=512)
EVEN = [[1 / 8] * 8]
SKEWED = [[0.5, 0.125, 0.125, 0.125, 0.125, 0.0, 0.0, 0.0]]


def job(shares: list[list[float]] | None, factor: float, **more: object) -> Job:
    load = Load() if shares is None else Load(name="given", shares=np.array(shares))
    given = {"devices": 8, "memory_limit_bytes": 1, "reserve_bytes": 0, "load": load, "capacity_factor": factor, **more}
    return Job(**given)  # type: ignore[arg-type]


def kept(shares: list[list[float]] | None, factor: float, tokens: float = T) -> float:
    return float(kept_ratio(job(shares, factor), MOE, row=0, tokens=np.full(1, tokens))[0])


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "factor", "slots"),
    [(4096, 2, 8, 1.0, 1024), (4096, 2, 8, 1.25, 1280), (1000, 8, 256, 1.25, 40)],
)
def test_slots_of_an_expert_per_source_rank(tokens: int, top_k: int, experts: int, factor: float, slots: int) -> None:
    assert expert_capacity(tokens=tokens, top_k=top_k, num_experts=experts, factor=factor) == slots


def test_dropless_keeps_everything() -> None:
    assert kept(SKEWED, 0.0) == 1.0
    assert kept_load(job(SKEWED, 0.0), MOE).shares is not None


def test_what_exceeds_capacity_is_dropped() -> None:
    """Expert 0 gets half of 8192 copies, 4096; capacity 1 leaves it 1024, and four experts their 1024: 5120 of 8192."""
    assert kept(SKEWED, 1.0) == 5120 / 8192
    assert kept(SKEWED, 2.0) == 6144 / 8192
    load = kept_load(job(SKEWED, 1.0), MOE)
    assert load.shares == pytest.approx(np.array([[0.2] * 5 + [0.0] * 3]))


def test_balanced_experts_lose_only_below_a_factor_of_one() -> None:
    """4096 x 2 / 8 x 0.5 = 512 slots for 1024 copies."""
    assert kept(None, 1.0) == 1.0
    assert kept(None, 0.5) == 0.5


def test_slots_are_whole() -> None:
    """10 tokens, 20 copies, 2.5 per expert: 3 slots at a factor of 1; of 10 copies for expert 0 three stay, with 10
    others.
    """
    assert kept(SKEWED, 1.0, tokens=10) == (3 + 4 * 2.5) / 20


def test_capacity_beyond_a_ranks_tokens_drops_nothing() -> None:
    """At factor 4.1 an expert has 4199 slots for 4096 tokens."""
    assert kept([[1.0] + [0.0] * 7], 4.1) == 1.0
    assert kept_load(job([[1.0] + [0.0] * 7], 4.1), MOE).shares == pytest.approx(np.array([[1.0] + [0.0] * 7]))


def test_each_source_rank_drops_by_itself() -> None:
    """Two ranks send all copies to one expert each, 0 and 1: of either 1024 of 8192 stay, whatever the sum says."""
    sources = np.zeros((1, 2, 8))
    sources[0, 0, 0] = sources[0, 1, 1] = 0.5
    load = Load(name="given", shares=sources.sum(axis=1), source_shares=sources)
    given = replace(job(None, 1.0), load=load)
    assert kept_ratio(given, MOE, row=0, tokens=np.full(1, float(T)))[0] == 1024 / 8192
    cut = kept_load(given, MOE)
    assert cut.shares is not None
    assert cut.source_shares is not None
    assert cut.shares[0, :2] == pytest.approx([0.5, 0.5])
    assert cut.source_shares.sum() == pytest.approx(1.0)


def test_padded_inputs_are_balanced_and_of_fixed_size() -> None:
    given = job(SKEWED, 1.25, pad_to_capacity=True)
    assert padded_capacity(given, MOE, np.full(1, float(T)))[0] == 1280
    assert np.array_equal(kept_load(given, MOE).shares, np.array(EVEN))
    assert padded_capacity(job(SKEWED, 1.25), MOE, np.full(1, float(T)))[0] == 0


def shape_of(shares: list[list[float]] | None, factor: float, text: str = "ep=4", **more: object) -> DispatchShape:
    where = context(small_model(), 8, global_batch=8, shares=shares, capacity_factor=factor, **more)
    shapes = block_shapes(where.machine, where.job, PlanTable.from_plans([plan(where, text)]))
    ratio = kept_ratio(where.job, MOE, row=0, tokens=shapes.local_tokens)
    return dispatch_shape(where, MOE, shapes, load_ratio=np.ones(1), kept_ratio=ratio)


def test_padded_rows_of_a_rank() -> None:
    """1280 slots x 4 ep ranks x 2 local experts; with etp 2 and half of the tokens each, 640 slots x 8 ranks x 2."""
    assert shape_of(None, 1.25, pad_to_capacity=True).rows == 1280 * 4 * 2
    assert shape_of(None, 1.25, "tp=2,ep=4,etp=2", pad_to_capacity=True).rows == 640 * 8 * 2
    assert combine_sent_bytes(shape_of(None, 1.25, pad_to_capacity=True)) == 8 * 1280 * 3 / 4 * 2 * 1024


def test_dropped_copies_are_neither_sent_nor_processed() -> None:
    whole, cut = shape_of(SKEWED, 0.0), shape_of(SKEWED, 1.0)
    assert cut.rows == whole.rows * 5 / 8
    assert combine_sent_bytes(cut) == combine_sent_bytes(whole) * 5 / 8


def priced(shares: list[list[float]] | None, factor: float, **more: object) -> BlockCosts:
    where = context(
        small_model(), 8, machine=round_machine(), global_batch=8, shares=shares, capacity_factor=factor, **more
    )
    _, rows = kinds_by_load(where.model, where.job.load)
    table = PlanTable.from_plans([plan(where, f"ep=8,dispatcher={name}") for name in ("alltoall", "hybridep")])
    return block_costs(where, table, rows)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25])
def test_a_uniform_histogram_is_balanced_at_any_capacity(factor: float, padded: bool) -> None:
    uniform, balanced = (priced(shares, factor, pad_to_capacity=padded) for shares in (EVEN, None))
    for mine, theirs in zip(uniform.times, balanced.times, strict=True):
        assert np.array_equal(mine.forward, theirs.forward)
        assert np.array_equal(mine.backward, theirs.backward)
        assert np.array_equal(mine.sent_forward_bytes, theirs.sent_forward_bytes)
    for held, kept_there in zip(uniform.memories, balanced.memories, strict=True):
        assert np.array_equal(held.saved, kept_there.saved)


def test_capacity_bounds_imbalance() -> None:
    """Half of all copies on one expert of 8: four times the mean. At capacity 1 five experts share what is kept: 1.6
    times.
    """
    free, bounded = priced(SKEWED, 0.0), priced(SKEWED, 1.0)
    assert (bounded.times[1].forward[Part.IMBALANCE] < free.times[1].forward[Part.IMBALANCE]).all()
    assert (bounded.memories[1].saved < free.memories[1].saved).all()
    assert (bounded.times[1].sent_forward_bytes[Wire.COMBINE] < free.times[1].sent_forward_bytes[Wire.COMBINE]).all()


def test_padding_to_capacity_takes_more_than_balanced_and_no_imbalance() -> None:
    padded, balanced = priced(SKEWED, 1.25, pad_to_capacity=True), priced(None, 0.0)
    assert (padded.times[1].forward[Part.IMBALANCE] == 0).all()
    assert (padded.times[1].forward[Part.EXPERT] > balanced.times[1].forward[Part.EXPERT]).all()
    assert (padded.memories[1].saved > balanced.memories[1].saved).all()
