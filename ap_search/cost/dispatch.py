"""Dispatch and combine of one MoE layer: bytes that one rank sends and receives, by dispatcher, both ways."""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.destinations import destinations
from ap_search.cost.message import SOURCE_INDEX_BYTES, internode_message_bytes, token_payload_bytes
from ap_search.plan.plan import Dispatcher
from ap_search.spec.blocks import MoeFfn
from ap_search.units import BF16_BYTES, FP32_BYTES, Quantity

COUNT_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DispatchShape:
    """What one rank dispatches in one pass of one layer, and where its group lies; each field broadcasts over plans.

    `tokens` are those the rank holds before dispatch, `hidden` the width that travels, `load_ratio` the worst rank's
    rows over the mean (1: balanced), `sent_ratio` what the busiest source rank sends over the mean, `kept_ratio` the
    share of copies that capacity lets through, `padded_capacity` the copies that each source rank sends to each expert
    where experts' inputs are padded to capacity (0: they are not), `redundant_experts` copies of experts per layer.
    `row_alignment` is what each expert's rows are padded to a multiple of, `fp8_dispatch` says that deepep sends tokens
    to experts in fp8. `*_per_domain` count members of the group that share a scale-up domain, `*_domains` the domains
    that the group spans.
    """

    moe: MoeFfn
    tokens: Quantity
    hidden: float
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
    padded_capacity: Quantity = 0.0
    redundant_experts: int = 0
    row_alignment: int = 1
    fp8_dispatch: bool = False

    def take(self, rows: NDArray[np.int64]) -> "DispatchShape":
        """Keep some plans."""
        held = ((field.name, getattr(self, field.name)) for field in fields(self))
        taken: dict[str, Any] = {name: value[rows] for name, value in held if isinstance(value, np.ndarray)}
        return replace(self, **taken)

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
        """Token copies that a rank sends on average, to itself included: what capacity keeps, or its padded slots."""
        kept = self.tokens * self.moe.top_k * self.kept_ratio
        padded = self.moe.num_experts * self.padded_capacity
        return np.where(np.greater(self.padded_capacity, 0), padded, kept)

    @property
    def rows(self) -> Quantity:
        """Token copies that the worst rank's experts receive."""
        return self.copies * self.etp * self.load_ratio

    @property
    def padding_rows(self) -> Quantity:
        """Rows that alignment adds on one rank: on average half of the most for each expert; none at capacity."""
        rows = self.local_experts * (self.row_alignment - 1) / 2.0
        return np.where(np.greater(self.padded_capacity, 0), 0.0, rows)

    @property
    def aligned_rows(self) -> Quantity:
        """Rows that the worst rank's experts process and keep, padding included."""
        return self.rows + self.padding_rows

    @property
    def pads_by_copying(self) -> Quantity:
        """Whether experts copy their rows into padded ones and back (1 or 0); hybridep pads while it permutes."""
        fused = np.equal(self.dispatcher, Dispatcher.HYBRIDEP) & np.greater(self.group, 1)
        return np.where(fused | (self.row_alignment == 1), 0.0, 1.0)

    @property
    def group(self) -> Quantity:
        """Ranks of the dispatch group, ep x etp."""
        return self.ep * self.etp

    @property
    def away(self) -> Quantity:
        """Share of the group that is not this rank."""
        return (self.group - 1.0) / self.group

    @property
    def routing_bytes(self) -> int:
        """Bytes of routing map and probabilities of one token, which allgather sends along."""
        return self.moe.num_experts * (1 + self.router_bytes)

    def distinct_ranks(self) -> Quantity:
        """Expected destination ranks per token, each expert's ETP ranks all counted."""
        return self._reached(self.ep) * self.etp

    def distinct_domains(self) -> Quantity:
        """Expected scale-up domains per token, its own included."""
        return self._reached(np.maximum(self.group_domains, 1))

    def _reached(self, groups: Quantity) -> Quantity:
        """Expected destinations out of `groups`: one is lost where capacity drops all of a token's copies to it."""
        # Independent draws that reach as many when all copies are kept: each falls on a group with probability `hit`.
        hit = 1.0 - (1.0 - destinations(self.moe, groups) / groups) ** (1.0 / self.moe.top_k)
        return groups * (1.0 - (1.0 - hit * self.kept_ratio) ** self.moe.top_k)

    def delivered(self, ratio: Quantity) -> Quantity:
        """Tokens that arrive at one rank once each, itself included, where it gets `ratio` times the mean."""
        return self.tokens * np.minimum(self.distinct_ranks() * ratio, self.group)


def dispatch_sent_bytes(shape: DispatchShape, *, backward: bool = False) -> Quantity:
    """Bytes that the busiest rank sends to other ranks in one dispatch, or in the backward of one; itself left out.

    Parameters
    ----------
    shape : DispatchShape
        Tokens, widths, group and dispatcher.
    backward : bool
        Dispatch's backward carries gradients of tokens and probabilities home: a combine.

    Returns
    -------
    Quantity
        By dispatcher: allgather sends its tokens, map and probabilities to each other rank of ETP x EP; alltoall one
        copy per (token, expert) over EP, gathers over ETP, and gathers E counts; deepep one copy with indices, weights
        and source per (token, destination rank); hybridep one copy with the probabilities of that rank's experts, and
        the routing map to all.

    Notes
    -----
    A1. Copies fall uniformly on ranks but for the ratios, so (ep-1)/ep of them leave.
    A2. Payloads are bf16, but for deepep's tokens towards experts with `fp8_dispatch`; probabilities are in the
        router's type (deepep and hybridep: fp32).
    A3. The busiest source rank sends `sent_ratio` times the mean; what comes from experts is `load_ratio` times it.
    A4. A token that crosses domains is sent over the network once per domain and handed on inside; only its deliveries
        to ranks count here, so that what is sent is what is received.

    Source: Megatron-LM d98e8a64 `megatron/core/transformer/moe/token_dispatcher.py`, `fused_a2a.py`; deepseek-ai/DeepEP
    dd758caf `csrc/kernels/legacy/intranode.cu`, hybrid-ep branch (allgather_routing_map).
    """
    if backward:
        return _homeward_bytes(shape, forward=False, ratio=shape.load_ratio)
    return _outward_bytes(shape, forward=True, ratio=shape.sent_ratio)


def dispatch_received_bytes(shape: DispatchShape, *, backward: bool = False) -> Quantity:
    """Bytes that the busiest rank receives from other ranks in one dispatch, or in the backward of one.

    Parameters
    ----------
    shape, backward
        As for `dispatch_sent_bytes`.

    Returns
    -------
    Quantity
        As sent, but towards experts `load_ratio` times the mean, and home `sent_ratio` times it.

    Source: as `dispatch_sent_bytes`.
    """
    if backward:
        return _homeward_bytes(shape, forward=False, ratio=shape.sent_ratio)
    return _outward_bytes(shape, forward=True, ratio=shape.load_ratio)


def combine_sent_bytes(shape: DispatchShape, *, backward: bool = False) -> Quantity:
    """Bytes that the busiest rank sends to other ranks in one combine, or in the backward of one; itself left out.

    Parameters
    ----------
    shape : DispatchShape
        As for `dispatch_sent_bytes`.
    backward : bool
        Combine's backward carries gradients to the experts: a dispatch whose layout is known.

    Returns
    -------
    Quantity
        By dispatcher: allgather reduce-scatters over ETP x EP in the probabilities' type; alltoall reduce-scatters over
        ETP in that type, then exchanges copies; deepep and hybridep return one partial sum per (token, destination
        rank).

    Notes
    -----
    A1. Partial sums are bf16; the reduce-scatters run in the router's type (fp32 router: 4 bytes), and so do the
        gathers that are their backward.
    A2. As A1 to A4 of `dispatch_sent_bytes`.

    Source: as `dispatch_sent_bytes`.
    """
    if backward:
        return _outward_bytes(shape, forward=False, ratio=shape.sent_ratio)
    return _homeward_bytes(shape, forward=True, ratio=shape.load_ratio)


def combine_received_bytes(shape: DispatchShape, *, backward: bool = False) -> Quantity:
    """Bytes that the busiest rank receives from other ranks in one combine, or in the backward of one.

    Parameters
    ----------
    shape, backward
        As for `combine_sent_bytes`.

    Returns
    -------
    Quantity
        As sent, but home `sent_ratio` times the mean, and towards experts `load_ratio` times it.

    Source: as `dispatch_sent_bytes`.
    """
    if backward:
        return _outward_bytes(shape, forward=False, ratio=shape.load_ratio)
    return _homeward_bytes(shape, forward=True, ratio=shape.sent_ratio)


def _outward_bytes(shape: DispatchShape, *, forward: bool, ratio: Quantity) -> Quantity:
    """Bytes of one rank towards experts: tokens with their routing, or gradients of the experts' outputs."""
    hidden, experts, prob = shape.hidden, shape.moe.num_experts, shape.router_bytes
    wide = hidden * (BF16_BYTES if forward else prob)
    gathered = (shape.group - 1) * shape.tokens * (wide + (shape.routing_bytes if forward else 0))
    remote = (shape.ep - 1.0) / shape.ep
    copy = hidden * BF16_BYTES + (prob if forward else 0)
    over_etp = shape.load_ratio * (shape.etp - 1.0) * (copy if forward else hidden * prob)
    counts = COUNT_BYTES * experts * (shape.group - 1) if forward else 0.0
    exchanged = shape.copies * (copy * remote * ratio + over_etp) + counts
    delivered = shape.delivered(ratio) * shape.away
    deepep = delivered * deepep_token_bytes(shape, forward=forward)
    hybrid = delivered * hybridep_token_bytes(shape, forward=forward)
    if forward:
        hybrid = hybrid + (shape.group - 1) * shape.tokens * experts
    return by_dispatcher(shape, allgather=gathered, alltoall=exchanged, deepep=deepep, hybridep=hybrid)


def _homeward_bytes(shape: DispatchShape, *, forward: bool, ratio: Quantity) -> Quantity:
    """Bytes of one rank from experts: their outputs, or gradients of tokens and probabilities."""
    hidden, experts, prob = shape.hidden, shape.moe.num_experts, shape.router_bytes
    wide = hidden * (prob if forward else BF16_BYTES)
    scattered = (shape.group - 1) * shape.tokens * (wide + (0 if forward else experts * prob))
    remote = (shape.ep - 1.0) / shape.ep
    copy = hidden * BF16_BYTES + (0 if forward else prob)
    over_etp = shape.load_ratio * (shape.etp - 1.0) * (hidden * prob if forward else copy)
    exchanged = shape.copies * (copy * remote * ratio + over_etp)
    delivered = shape.delivered(ratio) * shape.away
    weights = 0 if forward else FP32_BYTES * shape.moe.top_k
    partial = hidden * BF16_BYTES
    return by_dispatcher(
        shape,
        allgather=scattered,
        alltoall=exchanged,
        deepep=delivered * (partial + weights),
        hybridep=delivered * (partial + (0 if forward else FP32_BYTES * experts / shape.ep)),
    )


def deepep_token_bytes(shape: DispatchShape, *, forward: bool) -> Quantity:
    """Bytes of one token that deepep delivers to one rank on its way to experts.

    Parameters
    ----------
    shape : DispatchShape
        Width, top-k, payload type.
    forward : bool
        With indices and weights, or by a layout that is known.

    Returns
    -------
    Quantity
        Payload, and forward 12 k + 4 bytes: 64-bit indices, fp32 weights, source.

    Source: deepseek-ai/DeepEP dd758caf `csrc/kernels/legacy/intranode.cu`.
    """
    payload = token_payload_bytes(shape.hidden, fp8=shape.fp8_dispatch)
    return payload + ((COUNT_BYTES + FP32_BYTES) * shape.moe.top_k + SOURCE_INDEX_BYTES if forward else 0)


def hybridep_token_bytes(shape: DispatchShape, *, forward: bool) -> Quantity:
    """Bytes of one token that hybridep delivers to one rank on its way to experts.

    Parameters
    ----------
    shape : DispatchShape
        Width, experts per rank.
    forward : bool
        With probabilities, or by a layout that is known.

    Returns
    -------
    Quantity
        bf16 payload, and forward an fp32 probability for each expert of the rank.

    Source: Megatron-LM d98e8a64 `fused_a2a.py` (no fp8 dispatch); deepseek-ai/DeepEP, hybrid-ep branch.
    """
    return shape.hidden * BF16_BYTES + (FP32_BYTES * shape.moe.num_experts / shape.ep if forward else 0)


def network_bytes(shape: DispatchShape, *, outward: bool, forward: bool) -> Quantity:
    """Bytes that deepep or hybridep sends from one rank to other scale-up domains in one pass.

    Parameters
    ----------
    shape : DispatchShape
        Tokens, domains.
    outward : bool
        Towards experts, or home.
    forward : bool
        Forward pass, or its mirror in the backward.

    Returns
    -------
    Quantity
        One message per (token, other domain), `exchange_ratio` times the mean; 0 inside one domain.

    Notes
    -----
    A1. DeepEP's message format for both; the domains of a group are equal.
    A2. The busiest rank's domain is as busy as the rank: no domain is busier.

    Source: deepseek-ai/DeepEP dd758caf `csrc/kernels/legacy/internode.cu`.
    """
    domains = np.maximum(shape.group_domains, 1)
    reached = np.minimum(shape.distinct_domains() * shape.exchange_ratio, domains)
    routed = shape.moe.top_k if outward and forward else 0
    size = internode_message_bytes(shape.hidden, top_k=routed, fp8=False)
    if outward and shape.fp8_dispatch:
        short = internode_message_bytes(shape.hidden, top_k=routed, fp8=True)
        size = np.where(shape.dispatcher == Dispatcher.DEEPEP, short, size)
    return shape.tokens * reached * (domains - 1.0) / domains * size


def by_dispatcher(
    shape: DispatchShape, *, allgather: Quantity, alltoall: Quantity, deepep: Quantity, hybridep: Quantity
) -> Quantity:
    """Choose per plan what its dispatcher does; nothing in a group of one.

    Parameters
    ----------
    shape : DispatchShape
        Dispatcher codes, group sizes.
    allgather, alltoall, deepep, hybridep : Quantity
        The quantity under each dispatcher.

    Returns
    -------
    Quantity
        One of the four per plan, 0 where the group has one rank.
    """
    code = shape.dispatcher
    fused = np.where(code == Dispatcher.DEEPEP, deepep, hybridep)
    chosen = np.where(code == Dispatcher.ALLGATHER, allgather, np.where(code == Dispatcher.ALLTOALL, alltoall, fused))
    return np.where(np.less_equal(shape.group, 1), 0.0, chosen)
