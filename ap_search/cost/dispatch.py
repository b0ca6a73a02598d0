"""Dispatch and combine of one MoE layer: bytes sent by dispatcher, state and buffers kept."""

from dataclasses import dataclass

import numpy as np

from ap_search.cost.destinations import destinations
from ap_search.plan.plan import Dispatcher
from ap_search.spec.blocks import MoeFfn
from ap_search.units import BF16_BYTES, FP32_BYTES, Quantity

COUNT_BYTES = 8
DEEPEP_NVLINK_BYTES_PER_HIDDEN_BYTE = 335_709_824 / 14_336
DEEPEP_RDMA_BYTES_PER_HIDDEN_BYTE = (377_677_824 + 336_047_360 - 335_709_824) / 14_336


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DispatchShape:
    """What one rank dispatches in one pass of one layer, and where its group lies; each field broadcasts over plans.

    `tokens` are those the rank holds before dispatch, `hidden` the width that travels, `load_ratio` the worst rank's
    rows over the mean (1: balanced), `kept_ratio` the share of copies that capacity lets through, `sent_ratio` what the
    busiest source rank sends over the mean, `redundant_experts` copies of experts per layer. `*_per_domain` count
    members of the group that share a scale-up domain, `*_domains` the domains that the group spans.
    """

    moe: MoeFfn
    tokens: Quantity
    hidden: Quantity
    ep: Quantity
    etp: Quantity
    dispatcher: Quantity
    ep_per_domain: Quantity
    ep_domains: Quantity
    etp_per_domain: Quantity
    etp_domains: Quantity
    group_per_domain: Quantity
    group_domains: Quantity
    router_bytes: int
    load_ratio: Quantity
    kept_ratio: Quantity
    sent_ratio: Quantity = 1.0
    redundant_experts: int = 0

    @property
    def exchange_ratio(self) -> Quantity:
        """What the busiest rank sends or receives over the mean, whichever is more."""
        return np.maximum(self.load_ratio, self.sent_ratio)

    @property
    def local_experts(self) -> Quantity:
        """Experts that this rank holds, copies of others included."""
        return (self.moe.num_experts + self.redundant_experts) / self.ep

    @property
    def copies(self) -> Quantity:
        """Token copies that this rank sends, itself included: tokens times top-k, less what capacity drops."""
        return self.tokens * self.moe.top_k * self.kept_ratio

    @property
    def rows(self) -> Quantity:
        """Token copies that the worst rank's experts receive."""
        return self.copies * self.etp * self.load_ratio

    @property
    def group(self) -> Quantity:
        """Ranks of the dispatch group, ep x etp."""
        return self.ep * self.etp

    @property
    def routing_bytes(self) -> int:
        """Bytes of routing map and probabilities of one token, which allgather sends along."""
        return self.moe.num_experts * (1 + self.router_bytes)

    def distinct_ranks(self) -> Quantity:
        """Expected destination ranks per token, each expert's ETP ranks all counted."""
        return destinations(self.moe, self.ep) * self.etp * self.kept_ratio

    def distinct_domains(self) -> Quantity:
        """Expected scale-up domains per token, its own included."""
        return np.minimum(destinations(self.moe, np.maximum(self.group_domains, 1)), self.group_domains)


def dispatch_sent_bytes(shape: DispatchShape) -> Quantity:
    """Bytes that one rank sends to other ranks in one forward dispatch, metadata included, itself left out.

    Parameters
    ----------
    shape : DispatchShape
        Tokens, widths, group and dispatcher.

    Returns
    -------
    Quantity
        By dispatcher: allgather sends its tokens, map and probs to each other rank of ETP x EP; alltoall one copy per
        (token, expert) over EP and then gathers over ETP; deepep and hybridep one copy per (token, destination rank).

    Notes
    -----
    A1. Copies fall uniformly on ranks, so (ep-1)/ep of them leave.
    A2. bf16 payload, probabilities in the router's type.
    A3. The busiest source rank sends `sent_ratio` times the mean, where loads per source rank are known; over ETP it
        passes on what it received.

    Source: Megatron-LM `megatron/core/transformer/moe/token_dispatcher.py`, `fused_a2a.py`; DeepEP.
    """
    token_bytes = shape.hidden * BF16_BYTES
    gathered = (shape.group - 1) * shape.tokens * (token_bytes + shape.routing_bytes)
    remote = (shape.ep - 1.0) / shape.ep
    copy = token_bytes + shape.router_bytes
    copies = shape.copies * (remote * shape.sent_ratio + (shape.etp - 1.0) * shape.load_ratio)
    exchanged = copies * copy + COUNT_BYTES * shape.moe.num_experts * (shape.group - 1)
    away = (shape.group - 1.0) / shape.group
    message = token_bytes + (FP32_BYTES + COUNT_BYTES) * shape.moe.top_k
    sent_once = shape.tokens * shape.sent_ratio * shape.distinct_ranks() * message * away
    alone = shape.group <= 1
    return np.where(
        alone, 0.0, by_dispatcher(shape.dispatcher, allgather=gathered, alltoall=exchanged, fused=sent_once)
    )


def combine_sent_bytes(shape: DispatchShape) -> Quantity:
    """Bytes that one rank sends to other ranks in one forward combine, itself left out.

    Parameters
    ----------
    shape : DispatchShape
        As for `dispatch_sent_bytes`.

    Returns
    -------
    Quantity
        By dispatcher: allgather reduce-scatters over ETP x EP in the probs type; alltoall reduce-scatters over ETP in
        the probs type, then exchanges copies; deepep and hybridep return one partial sum per (token, destination rank).

    Notes
    -----
    A1. Combine is bf16; the reduce-scatters run in the router's type (fp32 router: 4 bytes).
    A2. The worst rank returns `load_ratio` times the mean copies.

    Source: as `dispatch_sent_bytes`.
    """
    token_bytes = shape.hidden * BF16_BYTES
    reduced = shape.hidden * shape.router_bytes
    scattered = (shape.group - 1) * shape.tokens * reduced
    remote = (shape.ep - 1.0) / shape.ep
    exchanged = shape.copies * shape.load_ratio * (token_bytes * remote + reduced * (shape.etp - 1.0))
    away = (shape.group - 1.0) / shape.group
    sent_once = shape.tokens * shape.distinct_ranks() * shape.load_ratio * token_bytes * away
    return np.where(
        shape.group <= 1, 0.0, by_dispatcher(shape.dispatcher, allgather=scattered, alltoall=exchanged, fused=sent_once)
    )


def by_dispatcher(dispatcher: Quantity, *, allgather: Quantity, alltoall: Quantity, fused: Quantity) -> Quantity:
    """Choose per plan among three quantities; deepep and hybridep share the last.

    Parameters
    ----------
    dispatcher : Quantity
        Dispatcher codes.
    allgather, alltoall, fused : Quantity
        The quantity under each dispatcher.

    Returns
    -------
    Quantity
        One of the three per plan.
    """
    return np.where(
        dispatcher == Dispatcher.ALLGATHER, allgather, np.where(dispatcher == Dispatcher.ALLTOALL, alltoall, fused)
    )


def dispatch_state_bytes(shape: DispatchShape) -> Quantity:
    """Bytes of dispatch state that each outstanding micro-batch keeps per MoE layer, on one device.

    Parameters
    ----------
    shape : DispatchShape
        Tokens, experts, top-k, dispatcher.

    Returns
    -------
    Quantity
        Routing map (one byte per token and expert), sorted indices and probabilities (per copy), split sizes.

    Notes
    -----
    A1. The state lives from dispatch to the end of that micro-batch's backward, so it counts per micro-batch in flight.

    Source: Megatron-LM `token_dispatcher.py` (routing_map, reversed_local_input_permutation_mapping, probs, splits);
    requirement 000 (dispatch context per micro-batch).
    """
    indices = (FP32_BYTES + COUNT_BYTES) * shape.copies
    splits = COUNT_BYTES * (shape.group * 2 + shape.moe.num_experts)
    return shape.tokens * shape.moe.num_experts + indices + splits


def dispatch_transient_bytes(shape: DispatchShape) -> Quantity:
    """Bytes of send, receive and output buffers that live only while one MoE layer runs, on the worst rank.

    Parameters
    ----------
    shape : DispatchShape
        Copies, rows, dispatcher.

    Returns
    -------
    Quantity
        alltoall: permuted send buffer, receive buffer, experts' output; allgather: gathered tokens and the output;
        deepep, hybridep: received distinct tokens and the output. In a group of one the output only: permuted tokens
        are the first product's saved input.

    Notes
    -----
    A1. The backward needs buffers of the same size.

    Source: Megatron-LM `token_dispatcher.py`, DeepEP.
    """
    width = shape.hidden * BF16_BYTES
    alltoall = (shape.copies + 2.0 * shape.rows) * width
    allgather = (shape.group * shape.tokens + shape.rows) * width
    fused = (shape.tokens * shape.distinct_ranks() * shape.load_ratio + shape.rows) * width
    buffers = by_dispatcher(shape.dispatcher, allgather=allgather, alltoall=alltoall, fused=fused)
    return np.where(shape.group <= 1, shape.rows * width, buffers)


def dispatcher_buffer_bytes(*, dispatcher: Quantity, hidden: int, group: Quantity, domains: Quantity) -> Quantity:
    """Bytes of fixed communication buffers that a dispatcher allocates once per device.

    Parameters
    ----------
    dispatcher : Quantity
        Dispatcher codes.
    hidden : int
        Hidden size, elements.
    group, domains : Quantity
        Ranks of the dispatch group; scale-up domains that it spans.

    Returns
    -------
    Quantity
        DeepEP (and HybridEP): 335,709,824 B at hidden 7168 inside a domain, 713,725,184 B across; 0 for collectives.

    Notes
    -----
    A1. Megatron-LM's defaults (20 SMs); proportional to the hidden size, independent of the number of ranks inside.
    A2. HybridEP's buffers are taken as DeepEP's.

    Source: DeepEP `csrc/legacy/config.hpp` size hints, evaluated at EP8 and EP64.
    """
    hidden_bytes = hidden * BF16_BYTES
    inside = DEEPEP_NVLINK_BYTES_PER_HIDDEN_BYTE * hidden_bytes
    across = np.where(domains > 1, DEEPEP_RDMA_BYTES_PER_HIDDEN_BYTE * hidden_bytes, 0.0)
    fused = (dispatcher >= Dispatcher.DEEPEP) & (group > 1)
    return np.where(fused, inside + across, 0.0)
