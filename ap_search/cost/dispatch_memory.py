"""Memory that dispatch takes: state of each micro-batch in flight, passing buffers of one layer, fixed buffers."""

import numpy as np

from ap_search.cost.dispatch import COUNT_BYTES, DispatchShape, by_dispatcher
from ap_search.cost.message import INDEX_BYTES, normal_buffer_bytes
from ap_search.plan.plan import Dispatcher
from ap_search.units import BF16_BYTES, FP32_BYTES, Quantity

HANDLE_BYTES_PER_RANK = 5
PADDED_COPIES = 2
DEEPEP_SMS = 20


def dispatch_state_bytes(shape: DispatchShape) -> Quantity:
    """Bytes of dispatch state that each outstanding micro-batch keeps per MoE layer, on one device.

    Parameters
    ----------
    shape : DispatchShape
        Tokens, experts, top-k, dispatcher.

    Returns
    -------
    Quantity
        Routing map (one byte per token and expert), probabilities and 64-bit indices per copy, split sizes per rank and
        expert. allgather: of all tokens of the group, for the local experts. deepep and hybridep instead: indices and
        weights of the own tokens, the handle (a flag and a position per token and rank), and per received token its
        source and its map of local experts.

    Notes
    -----
    A1. The state lives from dispatch to the end of that micro-batch's backward, so it counts per micro-batch in flight.
    A2. Nothing of it is shared between micro-batches: a second dispatch must not overwrite the first one's.

    Source: Megatron-LM d98e8a64 `token_dispatcher.py` (routing_map, reversed_local_input_permutation_mapping, probs,
    splits); deepseek-ai/DeepEP dd758caf `deep_ep/buffers/legacy.py` (handle); requirement 000 (dispatch context per
    micro-batch: splits, indices, shape).
    """
    experts, prob = shape.moe.num_experts, shape.router_bytes
    splits = COUNT_BYTES * (shape.group * 2 + experts)
    exchanged = shape.tokens * experts + (INDEX_BYTES + prob) * shape.copies + splits
    gathered = shape.group * shape.tokens * shape.local_experts + (INDEX_BYTES + prob) * shape.rows + splits
    own = shape.tokens * (shape.moe.top_k * (INDEX_BYTES + FP32_BYTES) + HANDLE_BYTES_PER_RANK * shape.group)
    received = shape.delivered(shape.load_ratio) * (FP32_BYTES + shape.local_experts)
    fused = own + received + INDEX_BYTES * shape.rows + splits
    chosen = by_dispatcher(shape, allgather=gathered, alltoall=exchanged, deepep=fused, hybridep=fused)
    return np.where(np.less_equal(shape.group, 1), exchanged, chosen)


def dispatch_transient_bytes(shape: DispatchShape) -> Quantity:
    """Bytes of send, receive and output buffers that live only while one MoE layer runs, on the worst rank.

    Parameters
    ----------
    shape : DispatchShape
        Copies, rows, dispatcher.

    Returns
    -------
    Quantity
        alltoall: permuted send buffer, receive buffer, experts' output (over ETP also its copy in the probabilities'
        type); allgather: experts' output, and all tokens of the group in bf16 and in the probabilities' type; deepep,
        hybridep: received distinct tokens and the output. In a group of one the output only: permuted tokens are the
        first product's saved input. In fp8 also the padded rows before and after the experts, where they are copies.

    Notes
    -----
    A1. The backward needs buffers of the same size.

    Source: Megatron-LM d98e8a64 `token_dispatcher.py` (combine casts to probs.dtype), DeepEP.
    """
    width = shape.hidden * BF16_BYTES
    cast = shape.hidden * (shape.router_bytes if shape.router_bytes != BF16_BYTES else 0)
    over_etp = np.where(np.greater(shape.etp, 1), shape.rows * cast, 0.0)
    alltoall = (shape.copies + 2.0 * shape.rows) * width + over_etp
    allgather = shape.group * shape.tokens * (width + cast) + shape.rows * width
    fused = (shape.delivered(shape.load_ratio) + shape.rows) * width
    buffers = by_dispatcher(shape, allgather=allgather, alltoall=alltoall, deepep=fused, hybridep=fused)
    padded = PADDED_COPIES * shape.pads_by_copying * shape.aligned_rows * width
    return np.where(np.less_equal(shape.group, 1), shape.rows * width, buffers) + padded


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
        DeepEP (and HybridEP): 335,709,824 B for 8 ranks of one domain at hidden 7168, 713,725,184 B for 64 of 8
        domains; 0 for collectives, and in a group of one.

    Notes
    -----
    A1. Megatron-LM's default of 20 multiprocessors.
    A2. HybridEP's buffers are taken as DeepEP's.

    Source: `normal_buffer_bytes`; Megatron-LM d98e8a64 `token_dispatcher.py` (set_deepep_num_sms).
    """
    fused = (np.asarray(dispatcher) >= Dispatcher.DEEPEP) & np.greater(group, 1)
    return np.where(fused, normal_buffer_bytes(hidden=hidden, ranks=group, nodes=domains, sms=DEEPEP_SMS), 0.0)
