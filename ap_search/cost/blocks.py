"""Cost of every block kind under every plan: layer kinds, embedding, MTP module, head; once per distinct shape."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.activations import BlockMemory, embedding_memory, head_memory, layer_memory, mtp_memory
from ap_search.cost.capacity import kept_load, kept_ratio
from ap_search.cost.context import CostContext
from ap_search.cost.dispatch import DispatchShape
from ap_search.cost.ffn import block_ffn_time
from ap_search.cost.head import embedding_time, head_time, mtp_projection_time
from ap_search.cost.imbalance import RankLoads, rank_loads
from ap_search.cost.keeps import keeps_of
from ap_search.cost.mixer import attention_time, linear_mixer_time, norm_time_s
from ap_search.cost.moe import dispatch_shape, moe_time
from ap_search.cost.overlap import paired_exchange_s
from ap_search.cost.parts import BlockTime, Part
from ap_search.cost.shapes import Shapes, block_shapes
from ap_search.plan.plan import Recompute
from ap_search.plan.table import PlanTable
from ap_search.spec.blocks import Attention, DenseFfn, LayerKind, LinearMixer, Model, MoeFfn
from ap_search.spec.job import Load, PlacementPolicy, Precision

FloatArray = NDArray[np.float64]
# One solution of the linear program on the device, per MoE layer and micro-batch (deepseek-ai/LPLB README: ~100 us).
LPLB_SOLVER_S = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockCosts:
    """Costs of all blocks: `times` and `memories` in block order (layer kinds, embedding, MTP module, head)."""

    times: tuple[BlockTime, ...]
    memories: tuple[BlockMemory, ...]
    shapes: Shapes

    def seconds(self, name: str) -> FloatArray:
        """Stack total seconds of `forward`, `backward`, `weight_grad` or `paired` to shape (blocks, shapes)."""
        arrays = [getattr(time, name) for time in self.times]
        return np.stack([array.sum(axis=0) if array.ndim == 2 else array for array in arrays])

    def bytes_of(self, name: str) -> FloatArray:
        """Stack one field of the memories to shape (blocks, shapes)."""
        return np.stack([getattr(memory, name) for memory in self.memories])


def kinds_by_load(model: Model, load: Load) -> tuple[Model, tuple[int, ...]]:
    """Give MoE layers kinds of their own where their loads differ, and name the load row of each kind.

    Parameters
    ----------
    model : Model
        Layer kinds.
    load : Load
        Shares, one row for all MoE layers or one per MoE layer.

    Returns
    -------
    tuple
        The model (unchanged where all rows are equal), and for each kind its row of the load, -1 for kinds without
        experts.

    Notes
    -----
    A1. MTP modules that hold a kind of their own take the load of the last MoE layer.
    """
    alike = _rows_alike(load)
    if len(set(alike)) == 1:
        return model, tuple(0 if kind.is_moe else -1 for kind in model.kinds)
    kinds: list[LayerKind] = list(model.kinds)
    rows = [alike[-1] if kind.is_moe else -1 for kind in kinds]
    layers = list(model.layers)
    known: dict[tuple[int, int], int] = {}
    for row, layer in zip(alike, model.moe_layers, strict=True):
        kind = (layers[layer], row)
        if kind not in known:
            known[kind] = len(kinds)
            kinds.append(model.kinds[kind[0]])
            rows.append(row)
        layers[layer] = known[kind]
    return replace(model, kinds=tuple(kinds), layers=tuple(layers)), tuple(rows)


def _rows_alike(load: Load) -> tuple[int, ...]:
    """Name for each row of a load the first row that is equal to it."""
    if load.shares is None:
        return (0,)
    source = load.shares if load.source_shares is None else load.source_shares
    first: dict[bytes, int] = {}
    return tuple(first.setdefault(each.tobytes(), row) for row, each in enumerate(source))


def groups_loads(context: CostContext, shapes: Shapes) -> RankLoads:
    """Work out how much more than its share the busiest rank of each plan's expert-parallel group receives.

    Parameters
    ----------
    context : CostContext
        Job and router.
    shapes : Shapes
        Degrees and placements.

    Returns
    -------
    RankLoads
        Of all groups in `shapes`.

    Source: docs/cost-model/imbalance.md.
    """
    return rank_loads(
        replace(context.job, load=kept_load(context.job, context.model.moe)),
        context.model.moe,
        ep=shapes.ep,
        domains=np.asarray(shapes.ep_place.domains),
        min_max_load=context.min_max_load,
    )


def _mixer_time(context: CostContext, kind: LayerKind, shapes: Shapes) -> BlockTime:
    """Time of a layer's mixer, whichever kind it is."""
    if isinstance(kind.mixer, Attention):
        return attention_time(context, kind.mixer, shapes)
    if isinstance(kind.mixer, LinearMixer):
        return linear_mixer_time(context, kind.mixer, shapes)
    return BlockTime.empty(len(shapes.tp))


def _ffn_time(context: CostContext, kind: LayerKind, shapes: Shapes, shape: DispatchShape | None) -> BlockTime:
    """Time of a layer's feed-forward, whichever kind it is."""
    if isinstance(kind.ffn, MoeFfn) and shape is not None:
        return moe_time(context, kind.ffn, shapes, shape=shape)
    if isinstance(kind.ffn, DenseFfn):
        again = shapes.recomputes(Recompute.MLP)
        return block_ffn_time(context, shapes, ffn=kind.ffn, part=Part.DENSE_FFN, again=again)
    return BlockTime.empty(len(shapes.tp))


def _norms_time(context: CostContext, kind: LayerKind, shapes: Shapes) -> BlockTime:
    """Norms, residual additions, launch and solver costs of a layer; norms repeat under `layernorm` recompute."""
    software = context.software
    launch = software.launch_per_layer_s + (software.launch_per_moe_layer_s if kind.is_moe else 0.0)
    solved = kind.is_moe and context.job.placement is PlacementPolicy.LPLB and context.job.redundant_experts > 0
    time = BlockTime.empty(len(shapes.tp))
    forward = norm_time_s(context, shapes, norms=kind.num_norms, backward=False)
    time.forward[Part.OTHER] = forward + launch + (LPLB_SOLVER_S if solved else 0.0)
    time.backward[Part.OTHER] = norm_time_s(context, shapes, norms=kind.num_norms, backward=True) + 2.0 * launch
    time.backward[Part.RECOMPUTE] = np.where(shapes.recomputes(Recompute.LAYERNORM), forward, 0.0)
    return time


def _wait_for_host(context: CostContext, kind: LayerKind, shapes: Shapes, time: BlockTime) -> None:
    """Add what a layer waits for the host, where the device is done before the next kernels are enqueued.

    Experts padded to capacity have sizes that the host knows beforehand. What the busiest rank takes longer comes on
    top: its host is no faster.
    """
    software = context.software
    waits = kind.is_moe and not context.job.pad_to_capacity
    host = software.host_per_layer_s + (software.host_per_moe_layer_s if waits else 0.0)
    host *= 1.0 if context.job.precision is Precision.BF16 else software.host_fp8_ratio
    again = np.where(shapes.recomputes(Recompute.FULL), host, 0.0)
    for passed, needed in ((time.forward, host), (time.backward, 2.0 * host + again)):
        even = passed.sum(axis=0) - passed[Part.IMBALANCE]
        passed[Part.OTHER] += np.maximum(needed - even, 0.0)


def layer_time(context: CostContext, kind: LayerKind, shapes: Shapes, *, shape: DispatchShape | None) -> BlockTime:
    """Time of one layer and one micro-batch on one device, seconds, recompute included.

    Parameters
    ----------
    context : CostContext
        Model, machine, software, job.
    kind : LayerKind
        Mixer, feed-forward, norms.
    shapes : Shapes
        Tokens, splits, recompute bits.
    shape : DispatchShape or None
        Dispatch of this layer; None where it has no routed experts.

    Returns
    -------
    BlockTime
        Full recompute repeats the whole forward, its communication included, instead of single modules.

    Notes
    -----
    A1. Host and device run side by side: each pass of a layer takes the longer of the two.

    Source: docs/cost-model/compute.md; Megatron-LM `megatron/core/recompute.py`.
    """
    time = _mixer_time(context, kind, shapes)
    time = time.plus(_ffn_time(context, kind, shapes, shape)).plus(_norms_time(context, kind, shapes))
    full = shapes.recomputes(Recompute.FULL)
    time.backward[Part.RECOMPUTE] = np.where(full, time.forward.sum(axis=0), time.backward[Part.RECOMPUTE])
    time.sent_backward_bytes[:] += np.where(full, time.sent_forward_bytes, 0.0)
    _wait_for_host(context, kind, shapes, time)
    time.paired[:] = paired_exchange_s(context, shapes, time)
    return time


def block_costs(context: CostContext, table: PlanTable, load_rows: tuple[int, ...]) -> BlockCosts:
    """Price every block kind for every row of a table: seconds and bytes per micro-batch on one device.

    Parameters
    ----------
    context : CostContext
        Model (its kinds already split by load), machine, software, job.
    table : PlanTable
        Plans; only columns that a block can see are used, so pass one row per distinct combination.
    load_rows : tuple of int
        Row of the load for each kind, -1 for none.

    Returns
    -------
    BlockCosts
        In block order.
    """
    model = context.model
    shapes = block_shapes(context.machine, context.job, table)
    loads = context.rank_loads or groups_loads(context, shapes)
    keeps = keeps_of(context.software, context.job.precision)
    times: list[BlockTime] = []
    memories: list[BlockMemory] = []
    for kind, row in zip(model.kinds, load_rows, strict=True):
        shape = None
        if isinstance(kind.ffn, MoeFfn):
            ratio = loads.received_by(row, ep=shapes.ep, domains=shapes.ep_place.domains)
            shape = dispatch_shape(
                context,
                kind.ffn,
                shapes,
                load_ratio=ratio,
                kept_ratio=kept_ratio(context.job, kind.ffn, row=row, tokens=shapes.local_tokens),
                sent_ratio=loads.sent_ratio[row],
            )
        times.append(layer_time(context, kind, shapes, shape=shape))
        memories.append(layer_memory(kind, model.hidden_size, shapes, shape=shape, keeps=keeps))
    repeated = model.mtp_index
    head = head_time(context, shapes)
    mtp_time = times[repeated].plus(mtp_projection_time(context, shapes)).plus(head)
    mtp = mtp_memory(model.hidden_size, shapes, memories[repeated])
    return BlockCosts(
        times=(*times, embedding_time(context, shapes), mtp_time, head),
        memories=(*memories, embedding_memory(shapes), mtp, head_memory(model.hidden_size, shapes)),
        shapes=shapes,
    )
