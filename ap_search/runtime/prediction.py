"""What the cost model says of one executed step: the code that prices plans, at the loads that were really routed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.activations import (
    ID_BYTES,
    embedding_memory,
    head_memory,
    layer_memory,
    router_saved_bytes,
    softmax_bytes,
)
from ap_search.cost.context import CostContext
from ap_search.cost.details import stage_traffic
from ap_search.cost.dispatch import DispatchShape, combine_sent_bytes, dispatch_sent_bytes
from ap_search.cost.group import PlanGroup, plan_group
from ap_search.cost.in_flight import in_flight_chunk_vectors
from ap_search.cost.moe import dispatch_shape
from ap_search.cost.prepared import prepare
from ap_search.cost.shapes import Shapes, block_shapes
from ap_search.cost.stage_memory import stage_bytes
from ap_search.cost.stages import stage_runs
from ap_search.cost.state import padded_vocab
from ap_search.cost.step import stage_seconds
from ap_search.plan.mesh import Group, rank_groups
from ap_search.plan.plan import Dispatcher, Plan, Recompute
from ap_search.plan.table import PlanTable
from ap_search.result import Traffic
from ap_search.spec.blocks import MoeFfn
from ap_search.units import Quantity

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
ROLES = ("weights", "gradients", "optimizer")
KINDS = ("shared", "router", "expert")


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """What one rank routed in one forward of one MoE layer.

    `copies` per expert are those that it sends, its own ones included; `tokens_per_rank` are the distinct tokens for
    each member of its tp-ep group (empty for dispatchers that send copies).
    """

    layer: int
    copies: tuple[int, ...]
    tokens_per_rank: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """Bytes and counts of one rank and one step, as counted or as predicted.

    `sent` per purpose; `state` per kind and role (`expert`, `weights`); `saved` per block one figure for each forward
    in order; `in_flight` the worst moments, each with the micro-batches in flight of every chunk.
    """

    rank: int
    sent: Mapping[str, int]
    state: Mapping[tuple[str, str], int]
    saved: Mapping[str, tuple[int, ...]]
    in_flight: tuple[tuple[int, ...], ...]


def predict(context: CostContext, plan: Plan, routed: Sequence[Sequence[Routed]]) -> tuple[RankFigures, ...]:
    """Predict what every rank sends, keeps and saves in one step of a plan, bytes.

    Parameters
    ----------
    context : CostContext
        Model, machine, software and job of the run.
    plan : Plan
        The plan.
    routed : sequence of sequence of Routed
        Per rank, each forward of a MoE layer in order.

    Returns
    -------
    tuple of RankFigures
        Per rank.

    Notes
    -----
    A1. The formulas are those of `cost`; loads enter as ratios of the very rank over the mean, where a price takes the
        busiest rank's.

    Source: docs/guides/verify.md.
    """
    group = plan_group(prepare(context, PlanTable.from_plans([plan])), np.zeros(1, dtype=np.int64))
    loads = _Loads(plan, routed)
    traffic = tuple(_stage_traffic(group, stage) for stage in range(plan.pp))
    states = tuple(_stage_state(group, stage) for stage in range(plan.pp))
    figures = []
    for rank, stage in enumerate(_stage_of(plan)):
        dispatch, combine = _exchanged(group, loads, rank)
        sent = {
            "dispatch": dispatch,
            "combine": combine,
            "tp": traffic[stage].tp_bytes,
            "pp": traffic[stage].pp_bytes,
            "dp": traffic[stage].dp_bytes,
        }
        figures.append(
            RankFigures(
                rank=rank,
                sent=sent,
                state=states[stage],
                saved=_saved(group, loads, rank),
                in_flight=_in_flight(plan, stage),
            )
        )
    return tuple(figures)


def _stage_of(plan: Plan) -> tuple[int, ...]:
    """Pipeline stage of every rank."""
    groups = rank_groups(plan, group="pp")
    stages = {rank: stage for members in groups for stage, rank in enumerate(members)}
    return tuple(stages[rank] for rank in range(len(stages)))


def _stage_traffic(group: PlanGroup, stage: int) -> Traffic:
    """Traffic of one stage, at balanced load."""
    run = stage_runs(group.context.model, group.layout, schedule=group.schedule, every=True)[stage]
    return stage_traffic(group, run, stage_seconds(group, run))


def _stage_state(group: PlanGroup, stage: int) -> dict[tuple[str, str], int]:
    """Bytes of weights, gradients and optimizer state of one rank of a stage, per kind and role."""
    run = stage_runs(group.context.model, group.layout, schedule=group.schedule, every=True)[stage]
    parts = stage_bytes(group, run)
    kept = {"shared": parts.shared_kept, "router": parts.shared_kept, "expert": parts.expert_kept}
    return {
        (kind, role): round(float(np.asarray(getattr(parts, kind) * getattr(kept[kind], role))[0]))
        for kind in KINDS
        for role in ROLES
    }


def _in_flight(plan: Plan, stage: int) -> tuple[tuple[int, ...], ...]:
    """Worst moments of a stage: micro-batches in flight of each chunk."""
    vectors = in_flight_chunk_vectors(
        schedule=int(plan.schedule),
        pp=plan.pp,
        vpp=plan.vpp,
        stage=stage,
        num_microbatches=plan.num_microbatches,
    )
    return tuple(sorted(tuple(vector) for vector in vectors.tolist()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """Copies (or distinct tokens) of one rank in one forward of one layer.

    `leaving` and `arriving` go to and come from other ranks of the exchange; `exchanged_rows` are what the exchange
    over ep brought here, own ones included, `rows` what the experts process.
    """

    layer: int
    leaving: int
    arriving: int
    exchanged_rows: int
    rows: int


class _Loads:
    """Who sent how much to whom, from what every rank routed."""

    def __init__(self, plan: Plan, routed: Sequence[Sequence[Routed]]) -> None:
        self._plan = plan
        self._routed = routed

    def of(self, rank: int) -> list[_Load]:
        """Loads of one rank, in the order of its forwards."""
        return [self._load(rank, index, record) for index, record in enumerate(self._routed[rank])]

    def _load(self, rank: int, index: int, record: Routed) -> _Load:
        """Loads of one forward; the ranks of an expert-parallel group run the same layers in the same order."""
        plan = self._plan
        sent = self._sent_copies("ep", rank, index)
        mine = _members("ep", plan, rank).index(rank)
        arrived = {other: self._arrived(other, index) for other in _members("etp", plan, rank)}
        leaving, arriving = int(sent[mine].sum() - sent[mine, mine]), int(sent[:, mine].sum() - sent[mine, mine])
        if plan.dispatcher in (Dispatcher.DEEPEP, Dispatcher.HYBRIDEP):
            members = _members("tp-ep", plan, rank)
            place = members.index(rank)
            tokens = np.array([self._routed[member][index].tokens_per_rank for member in members])
            leaving = int(tokens[place].sum() - tokens[place, place])
            arriving = int(tokens[:, place].sum() - tokens[place, place])
        return _Load(
            layer=record.layer,
            leaving=leaving,
            arriving=arriving,
            exchanged_rows=arrived[rank],
            rows=sum(arrived.values()),
        )

    def _arrived(self, rank: int, index: int) -> int:
        """Copies that the exchange over ep brings to one rank, its own ones included."""
        members = _members("ep", self._plan, rank)
        return int(self._sent_copies("ep", rank, index)[:, members.index(rank)].sum())

    def _sent_copies(self, kind: Group, rank: int, index: int) -> IntArray:
        """Copies from every member of a rank's group to the experts of every member, shape (members, members)."""
        members = _members(kind, self._plan, rank)
        copies = np.array([self._routed[member][index].copies for member in members], dtype=np.int64)
        totals: IntArray = copies.reshape(len(members), len(members), -1).sum(axis=2)
        return totals


def _members(kind: Group, plan: Plan, rank: int) -> tuple[int, ...]:
    """Ranks of the group of one kind that a rank is in."""
    return next(members for members in rank_groups(plan, group=kind) if rank in members)


def _shape(group: PlanGroup, shapes: Shapes, layer: int) -> DispatchShape:
    """Dispatch of one layer at balanced load."""
    model = group.context.model
    moe = model.kinds[model.layers[layer]].ffn
    assert isinstance(moe, MoeFfn)
    return dispatch_shape(group.context, moe, shapes, load_ratio=np.ones(1), kept_ratio=np.ones(1))


def _shapes(group: PlanGroup) -> Shapes:
    """What one rank sees of one micro-batch."""
    return block_shapes(group.context.machine, group.context.job, group.table)


def _ratio(figure: float, mean: Quantity) -> FloatArray:
    """Figure of this rank over the mean; 1 where nothing travels."""
    share: FloatArray = np.where(np.greater(mean, 0), figure / np.maximum(mean, 1e-300), 1.0)
    return share


def _exchanged(group: PlanGroup, loads: _Loads, rank: int) -> tuple[int, int]:
    """Bytes that one rank sends for dispatch and for combine in one step, their backward and repetition included."""
    shapes, plan = _shapes(group), group.table.row(0)
    # A layer that is run again in backward dispatches and combines again; its backward runs once.
    backward_ratio = 0.5 if plan.recompute & (Recompute.FULL | Recompute.MOE) else 1.0
    dispatch = combine = 0.0
    for load in loads.of(rank):
        shape = _shape(group, shapes, load.layer)
        out, home = _outward(shape, load), _homeward(shape, load)
        dispatch += _total(dispatch_sent_bytes(out))
        dispatch += backward_ratio * sum(_total(dispatch_sent_bytes(each, backward=True)) for each in home)
        combine += sum(_total(combine_sent_bytes(each)) for each in home)
        combine += backward_ratio * _total(combine_sent_bytes(out, backward=True))
    return round(dispatch), round(combine)


def _total(size_bytes: Quantity) -> float:
    """Bytes of the only plan."""
    return float(np.asarray(size_bytes).ravel()[0])


def _outward(shape: DispatchShape, load: _Load) -> DispatchShape:
    """Dispatch towards experts at one rank's load."""
    if _deduplicates(shape):
        return replace(shape, sent_ratio=_ratio(load.leaving, shape.tokens * shape.distinct_ranks() * shape.away))
    remote = shape.copies * (shape.ep - 1.0) / shape.ep
    return replace(
        shape,
        sent_ratio=_ratio(load.leaving, remote),
        load_ratio=_ratio(load.exchanged_rows, shape.copies),
    )


def _homeward(shape: DispatchShape, load: _Load) -> tuple[DispatchShape, ...]:
    """Dispatch homewards at one rank's load; exchange over ep and reduction over etp apart: loads differ."""
    if _deduplicates(shape):
        mean = shape.tokens * shape.distinct_ranks() * shape.away
        return (replace(shape, load_ratio=_ratio(load.arriving, mean)),)
    if np.any(np.equal(shape.dispatcher, Dispatcher.ALLGATHER)):
        return (shape,)
    one = np.ones_like(shape.ep)
    exchange = _ratio(load.arriving, shape.copies * (shape.ep - 1.0) / shape.ep)
    others = _ratio(load.rows - load.exchanged_rows, shape.copies * (shape.etp - 1.0))
    return replace(shape, etp=one, load_ratio=exchange), replace(shape, ep=one, load_ratio=others)


def _deduplicates(shape: DispatchShape) -> bool:
    """Whether a token travels once per destination rank."""
    return bool(np.any(np.greater_equal(shape.dispatcher, Dispatcher.DEEPEP)))


def _saved(group: PlanGroup, loads: _Loads, rank: int) -> dict[str, tuple[int, ...]]:
    """Bytes that each block of a rank saves for backward, one figure per forward in order; the loss's of the step.

    What says where tokens go, the router's scores and the state of the dispatch, is apart under `layers.N routing`.
    """
    shapes, model, plan = _shapes(group), group.context.model, group.table.row(0)
    found: dict[str, list[int]] = {}
    for load in loads.of(rank):
        shape = _shape(group, shapes, load.layer)
        there = replace(shape, load_ratio=_ratio(load.rows, shape.copies * shape.etp))
        memory = layer_memory(model.kinds[model.layers[load.layer]], model.hidden_size, shapes, shape=there)
        scores = 0.0 if plan.recompute & Recompute.FULL else _total(router_saved_bytes(shape.moe, shapes))
        found.setdefault(f"layers.{load.layer}", []).append(round(_total(memory.saved) - scores))
        routing = round(_total(memory.dispatch_state) + scores)
        found.setdefault(f"layers.{load.layer} routing", []).append(routing)
    every = {name: tuple(sizes) for name, sizes in found.items()}
    count = plan.num_microbatches
    for layer, kind in enumerate(model.kinds[index] for index in model.layers):
        if not kind.is_moe:
            memory = layer_memory(kind, model.hidden_size, shapes, shape=None)
            every[f"layers.{layer}"] = (round(_total(memory.saved)),) * count
    every["embedding"] = (round(_total(embedding_memory(shapes).saved)),) * count
    vocab = padded_vocab(model.vocab_size, divisor=group.context.software.vocab_divisor, tp=shapes.tp)
    softmax = softmax_bytes(tokens=shapes.tokens, vocab=vocab, tp=shapes.tp, depths=1)
    labels = ID_BYTES * shapes.tokens
    every["head"] = (round(_total(head_memory(model.hidden_size, shapes).saved - labels)),) * count
    every["loss"] = (count * round(_total(softmax + labels)),)
    return every
