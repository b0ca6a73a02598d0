"""Seconds of one dispatch or combine pass by dispatcher and by where the group lies, and the traffic of permutation."""

import numpy as np

from ap_search.cost.collective import collective_time_s
from ap_search.cost.dispatch import DispatchShape, by_dispatcher
from ap_search.plan.plan import Dispatcher
from ap_search.spec.machine import Collective, Machine
from ap_search.units import BF16_BYTES, Quantity


def _fused_time_s(machine: Machine, shape: DispatchShape, latency_s: float) -> Quantity:
    """Time of a deduplicating kernel: the slower of scale-up receive and network send, plus a latency."""
    fit = machine.dispatch
    payload = shape.tokens * shape.hidden * BF16_BYTES * shape.exchange_ratio
    inside = payload * shape.distinct_ranks() / fit.scale_up_bytes_per_s
    domains = np.maximum(shape.group_domains, 1)
    across = payload * shape.distinct_domains() * (domains - 1.0) / domains / fit.network_bytes_per_s
    return np.maximum(inside, across) + latency_s


def dispatch_time_s(machine: Machine, shape: DispatchShape) -> Quantity:
    """Communication time of one forward dispatch pass on the worst rank, seconds (permutation not included).

    Parameters
    ----------
    machine : Machine
        Collective constants for allgather and alltoall; dispatch constants for deepep and hybridep.
    shape : DispatchShape
        As for `dispatch_sent_bytes`.

    Returns
    -------
    Quantity
        0 where ep x etp = 1.

    Notes
    -----
    A1. The pass ends when the rank that receives the most has received it and the one that sends the most has sent it:
        `exchange_ratio` times the mean.
    A2. A group beyond one scale-up domain pays the network for what leaves it.

    Source: `collective_time_s`; two-resource maximum fitted on DeepEP's published normal kernels.
    """
    token_bytes = shape.hidden * BF16_BYTES
    gathered = collective_time_s(
        machine,
        Collective.ALL_GATHER,
        size_bytes=shape.group * shape.tokens * (token_bytes + shape.routing_bytes),
        ranks=shape.group,
        ranks_per_domain=shape.group_per_domain,
        domains=shape.group_domains,
    )
    copies_bytes = shape.copies * (token_bytes + shape.router_bytes)
    exchanged = _exchange_s(machine, shape, copies_bytes * shape.exchange_ratio) + collective_time_s(
        machine,
        Collective.ALL_GATHER,
        size_bytes=shape.etp * copies_bytes * shape.load_ratio,
        ranks=shape.etp,
        ranks_per_domain=shape.etp_per_domain,
        domains=shape.etp_domains,
    )
    fused = _fused_time_s(machine, shape, machine.dispatch.dispatch_latency_s)
    return np.where(
        shape.group <= 1, 0.0, by_dispatcher(shape.dispatcher, allgather=gathered, alltoall=exchanged, fused=fused)
    )


def combine_time_s(machine: Machine, shape: DispatchShape) -> Quantity:
    """Communication time of one forward combine pass on the worst rank, seconds (permutation not included).

    Parameters
    ----------
    machine, shape
        As for `dispatch_time_s`.

    Returns
    -------
    Quantity
        0 where ep x etp = 1.

    Notes
    -----
    A1. As A1 and A2 of `dispatch_time_s`.
    A2. Reduce-scatters run in the router's type.

    Source: as `dispatch_time_s`.
    """
    token_bytes = shape.hidden * BF16_BYTES
    reduced = shape.hidden * shape.router_bytes
    scattered = collective_time_s(
        machine,
        Collective.REDUCE_SCATTER,
        size_bytes=shape.group * shape.tokens * reduced,
        ranks=shape.group,
        ranks_per_domain=shape.group_per_domain,
        domains=shape.group_domains,
    )
    exchanged = _exchange_s(machine, shape, shape.copies * token_bytes * shape.exchange_ratio) + collective_time_s(
        machine,
        Collective.REDUCE_SCATTER,
        size_bytes=shape.etp * shape.copies * shape.load_ratio * reduced,
        ranks=shape.etp,
        ranks_per_domain=shape.etp_per_domain,
        domains=shape.etp_domains,
    )
    fused = _fused_time_s(machine, shape, machine.dispatch.combine_latency_s)
    return np.where(
        shape.group <= 1, 0.0, by_dispatcher(shape.dispatcher, allgather=scattered, alltoall=exchanged, fused=fused)
    )


def _exchange_s(machine: Machine, shape: DispatchShape, size_bytes: Quantity) -> Quantity:
    """Time of the all-to-all over the expert-parallel group."""
    return collective_time_s(
        machine,
        Collective.ALL_TO_ALL,
        size_bytes=size_bytes,
        ranks=shape.ep,
        ranks_per_domain=shape.ep_per_domain,
        domains=shape.ep_domains,
    )


def permute_bytes(shape: DispatchShape, local_experts: Quantity) -> Quantity:
    """Bytes read and written on this device by permuting tokens for one pass (or unpermuting them).

    Parameters
    ----------
    shape : DispatchShape
        Copies and rows.
    local_experts : Quantity
        Experts of this rank: with one there is nothing to sort after arrival.

    Returns
    -------
    Quantity
        alltoall: read tokens, write copies, then read and write the received rows where several experts are local;
        allgather: read and write the rows; deepep: the expansion of received tokens to rows; hybridep: none, fused.

    Notes
    -----
    A1. Unpermuting moves the same bytes the other way.

    Source: Megatron-LM `moe_utils.py` permute/unpermute; HybridEP fuses both into its kernels.
    """
    width = shape.hidden * BF16_BYTES
    sort = np.where(local_experts > 1, 2.0 * shape.rows, 0.0)
    alltoall = (shape.tokens + shape.copies + sort) * width
    allgather = 2.0 * shape.rows * width
    expand = (shape.tokens * shape.distinct_ranks() * shape.load_ratio + shape.rows) * width
    alone = (shape.tokens + shape.copies) * width
    fused = np.where(shape.dispatcher == Dispatcher.HYBRIDEP, 0.0, expand)
    return np.where(
        shape.group <= 1, alone, by_dispatcher(shape.dispatcher, allgather=allgather, alltoall=alltoall, fused=fused)
    )
