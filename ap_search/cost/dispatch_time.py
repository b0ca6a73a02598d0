"""Seconds of one dispatch or combine pass by dispatcher and by where the group lies, and the traffic of permutation."""

import numpy as np

from ap_search.cost.collective import CollectiveLine, collective_line, collective_time_s
from ap_search.cost.dispatch import (
    COUNT_BYTES,
    DispatchShape,
    by_dispatcher,
    deepep_token_bytes,
    hybridep_token_bytes,
    network_bytes,
)
from ap_search.spec.machine import Collective, Machine
from ap_search.units import BF16_BYTES, FP32_BYTES, Quantity


def dispatch_time_s(machine: Machine, shape: DispatchShape, *, backward: bool = False) -> Quantity:
    """Communication time of one dispatch pass, or of its backward, on the worst rank, seconds (permutation left out).

    Parameters
    ----------
    machine : Machine
        Collective constants for allgather and alltoall; dispatch constants for deepep and hybridep.
    shape : DispatchShape
        As for `dispatch_sent_bytes`.
    backward : bool
        Dispatch's backward is a combine with gradients of probabilities.

    Returns
    -------
    Quantity
        0 where ep x etp = 1. Collectives one after the other: allgather hidden, map and probabilities; alltoall counts,
        hidden and probabilities. deepep and hybridep: the slowest of what a rank takes in, of its links inside the
        domain, and of its network, plus a latency.

    Notes
    -----
    A1. The pass ends when the rank that receives the most has received it and the one that sends the most has sent it:
        `exchange_ratio` times the mean.
    A2. A group beyond one scale-up domain pays the network for what leaves it.
    A3. The rate at which a rank takes tokens in counts its own ones, as DeepEP's published bandwidths do; each pair of
        devices of a full mesh has one link.
    A4. HybridEP runs at DeepEP's constants; the gather of its routing map is a collective before it.

    Source: `collective_time_s`; two-resource maximum fitted on DeepEP's published normal kernels,
    docs/cost-model/dispatch.md.
    """
    return _homeward_s(machine, shape, forward=False) if backward else _outward_s(machine, shape, forward=True)


def combine_time_s(machine: Machine, shape: DispatchShape, *, backward: bool = False) -> Quantity:
    """Communication time of one combine pass, or of its backward, on the worst rank, seconds (permutation left out).

    Parameters
    ----------
    machine, shape
        As for `dispatch_time_s`.
    backward : bool
        Combine's backward is a dispatch whose layout is known.

    Returns
    -------
    Quantity
        0 where ep x etp = 1.

    Notes
    -----
    A1. As A1 to A4 of `dispatch_time_s`.
    A2. Reduce-scatters, and the gathers that are their backward, run in the router's type.

    Source: as `dispatch_time_s`.
    """
    return _outward_s(machine, shape, forward=False) if backward else _homeward_s(machine, shape, forward=True)


def free_sm_ratio(machine: Machine) -> float:
    """Share of the multiprocessors that dispatch kernels leave to compute that runs beside them, 0..1.

    Parameters
    ----------
    machine : Machine
        Multiprocessors of the device, and those that the kernels occupy.

    Returns
    -------
    float
        `1 - sms/sm_count`: 0.85 for 20 of 132.

    Notes
    -----
    A1. NCCL's all-to-all takes as many as DeepEP.

    Source: Megatron-LM d98e8a64 `token_dispatcher.py` (20 SMs by default); deepseek-ai/DeepEP README.
    """
    return 1.0 - machine.dispatch.sms / machine.sm_count


def permute_bytes(shape: DispatchShape) -> Quantity:
    """Bytes read and written on this device by permuting tokens for one pass (or unpermuting them).

    Parameters
    ----------
    shape : DispatchShape
        Copies, rows, local experts: with one there is nothing to sort after arrival.

    Returns
    -------
    Quantity
        alltoall: read tokens, write copies, then read and write the received rows where several experts are local;
        allgather: read and write the rows; deepep: the expansion of received tokens to rows; hybridep: none, fused.

    Notes
    -----
    A1. Unpermuting moves the same bytes the other way, and so does the backward of either.

    Source: Megatron-LM d98e8a64 `moe_utils.py` permute/unpermute; HybridEP fuses both into its kernels.
    """
    width = shape.hidden * BF16_BYTES
    sort = np.where(np.greater(shape.local_experts, 1), 2.0 * shape.rows, 0.0)
    alltoall = (shape.tokens + shape.copies + sort) * width
    allgather = 2.0 * shape.rows * width
    deepep = (shape.delivered(shape.load_ratio) + shape.rows) * width
    moved = by_dispatcher(shape, allgather=allgather, alltoall=alltoall, deepep=deepep, hybridep=0.0)
    return np.where(np.less_equal(shape.group, 1), (shape.tokens + shape.copies) * width, moved)


def _outward_s(machine: Machine, shape: DispatchShape, *, forward: bool) -> Quantity:
    """Time of a pass towards experts: tokens with their routing, or gradients of the experts' outputs."""
    hidden, experts, prob = shape.hidden, shape.moe.num_experts, shape.router_bytes
    line = _group_line(machine, Collective.ALL_GATHER, shape)
    peers = (shape.group - 1) * shape.tokens
    gathered = line.time_s(peers * hidden * (BF16_BYTES if forward else prob))
    exchanged = _exchange_s(machine, shape, width_bytes=hidden * BF16_BYTES)
    over_etp = hidden * (BF16_BYTES if forward else prob)
    routing_map: Quantity = 0.0
    if forward:
        routing_map = line.time_s(peers * experts)
        gathered = gathered + routing_map + line.time_s(peers * experts * prob)
        counts = line.time_s(COUNT_BYTES * experts * (shape.group - 1.0))
        exchanged = exchanged + counts + _exchange_s(machine, shape, width_bytes=prob)
        over_etp = over_etp + prob
    exchanged = exchanged + _over_etp_s(machine, Collective.ALL_GATHER, shape, over_etp)
    latency = machine.dispatch.dispatch_latency_s
    network = network_bytes(shape, outward=True, forward=forward) / machine.dispatch.network_bytes_per_s
    deepep = _delivered_s(machine, shape, deepep_token_bytes(shape, forward=forward))
    hybridep = _delivered_s(machine, shape, hybridep_token_bytes(shape, forward=forward))
    return by_dispatcher(
        shape,
        allgather=gathered,
        alltoall=exchanged,
        deepep=np.maximum(deepep, network) + latency,
        hybridep=np.maximum(hybridep, network) + latency + routing_map,
    )


def _homeward_s(machine: Machine, shape: DispatchShape, *, forward: bool) -> Quantity:
    """Time of a pass from experts: their outputs, or gradients of tokens and probabilities."""
    hidden, experts, prob = shape.hidden, shape.moe.num_experts, shape.router_bytes
    line = _group_line(machine, Collective.REDUCE_SCATTER, shape)
    peers = (shape.group - 1) * shape.tokens
    scattered = line.time_s(peers * hidden * (prob if forward else BF16_BYTES))
    exchanged = _exchange_s(machine, shape, width_bytes=hidden * BF16_BYTES)
    over_etp = hidden * (prob if forward else BF16_BYTES)
    if not forward:
        scattered = scattered + line.time_s(peers * experts * prob)
        exchanged = exchanged + _exchange_s(machine, shape, width_bytes=prob)
        over_etp = over_etp + prob
    exchanged = exchanged + _over_etp_s(machine, Collective.REDUCE_SCATTER, shape, over_etp)
    latency = machine.dispatch.combine_latency_s
    network = network_bytes(shape, outward=False, forward=forward) / machine.dispatch.network_bytes_per_s
    partial = hidden * BF16_BYTES
    deepep = _delivered_s(machine, shape, partial + (0 if forward else FP32_BYTES * shape.moe.top_k))
    hybridep = _delivered_s(machine, shape, partial + (0 if forward else FP32_BYTES * experts / shape.ep))
    return by_dispatcher(
        shape,
        allgather=scattered,
        alltoall=exchanged,
        deepep=np.maximum(deepep, network) + latency,
        hybridep=np.maximum(hybridep, network) + latency,
    )


def _delivered_s(machine: Machine, shape: DispatchShape, token_bytes: Quantity) -> Quantity:
    """Time of the distinct tokens that a rank takes in or hands back: the slower of the kernel and of its links."""
    size = shape.delivered(shape.exchange_ratio) * token_bytes
    level, inside = machine.scale_up, np.maximum(shape.group_per_domain, 1)
    links = np.minimum(level.pair_bytes_per_s * np.maximum(inside - 1, 1), level.bytes_per_s)
    over_links = size * (inside - 1.0) / inside / (links * level.alltoall_efficiency_ratio)
    return np.asarray(np.maximum(size / machine.dispatch.scale_up_bytes_per_s, over_links))


def _group_line(machine: Machine, collective: Collective, shape: DispatchShape) -> CollectiveLine:
    """A collective over the dispatch group as a function of bytes sent."""
    return collective_line(
        machine,
        collective,
        ranks=shape.group,
        ranks_per_domain=shape.group_per_domain,
        domains=shape.group_domains,
    )


def _exchange_s(machine: Machine, shape: DispatchShape, *, width_bytes: Quantity) -> Quantity:
    """Time of the all-to-all of one tensor of copies over the expert-parallel group."""
    return collective_time_s(
        machine,
        Collective.ALL_TO_ALL,
        size_bytes=shape.copies * shape.exchange_ratio * width_bytes,
        ranks=shape.ep,
        ranks_per_domain=shape.ep_per_domain,
        domains=shape.ep_domains,
    )


def _over_etp_s(machine: Machine, collective: Collective, shape: DispatchShape, width_bytes: Quantity) -> Quantity:
    """Time of the gather or reduction of the busiest rank's copies over its expert tensor-parallel group."""
    return collective_time_s(
        machine,
        collective,
        size_bytes=shape.etp * shape.copies * shape.load_ratio * width_bytes,
        ranks=shape.etp,
        ranks_per_domain=shape.etp_per_domain,
        domains=shape.etp_domains,
    )
