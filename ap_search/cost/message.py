"""Bytes of one token as dispatchers send it: payload, metadata, DeepEP's messages and buffers."""

import numpy as np

from ap_search.units import BF16_BYTES, FP32_BYTES, Quantity

FP8_BYTES = 1
FP8_SCALE_WIDTH = 128
INDEX_BYTES = 8
SOURCE_INDEX_BYTES = 4
SOURCE_META_BYTES = 8
INT4_BYTES = 16
BUFFER_ALIGNMENT_BYTES = 128
BUFFER_MAX_TOPK, BUFFER_MAX_SCALES = 128, 128
NVL_PEERS = 8
RDMA_CHUNK_TOKENS = 128
# Receive slots per channel and peer of DeepEP's tables, by ranks of the group.
NVL_CHUNK_RANKS = (8, 64, 96, 128, 160)
NVL_CHUNK_TOKENS = (256, 288, 480, 560, 720)


def token_payload_bytes(hidden: Quantity, *, fp8: bool) -> Quantity:
    """Bytes of one token's hidden vector on the wire.

    Parameters
    ----------
    hidden : Quantity
        Elements.
    fp8 : bool
        One byte per element and one fp32 scale per 128 of them, else bf16.

    Returns
    -------
    Quantity
        At hidden 7168: 7,392 in fp8, 14,336 in bf16.

    Source: deepseek-ai/DeepEP `tests/legacy/test_intranode.py` (fp8 factor (1 + 4/128)/2).
    """
    if fp8:
        return hidden * FP8_BYTES + np.ceil(np.divide(hidden, FP8_SCALE_WIDTH)) * FP32_BYTES
    return hidden * BF16_BYTES


def internode_message_bytes(hidden: Quantity, *, top_k: int, fp8: bool) -> Quantity:
    """Bytes of one token in DeepEP's dispatch between nodes: payload, source, expert indices and weights, aligned.

    Parameters
    ----------
    hidden : Quantity
        Elements.
    top_k : int
        Experts per token; 0 where the layout is known from an earlier pass.
    fp8 : bool
        Whether the payload is fp8 with its scales.

    Returns
    -------
    Quantity
        A multiple of 16: 14,416 (bf16) or 7,472 (fp8) at hidden 7168 and top-8.

    Source: deepseek-ai/DeepEP dd758caf `csrc/kernels/legacy/internode.cu` (get_num_bytes_per_token).
    """
    routing = top_k * (SOURCE_INDEX_BYTES + FP32_BYTES)
    size = token_payload_bytes(hidden, fp8=fp8) + SOURCE_META_BYTES + routing
    return np.ceil(size / INT4_BYTES) * INT4_BYTES


def low_latency_dispatch_bytes(*, tokens: Quantity, top_k: int, hidden: int) -> Quantity:
    """Bytes that one rank sends in DeepEP's low-latency dispatch, itself included; no token is sent once for several.

    Parameters
    ----------
    tokens : Quantity
        Tokens of the rank.
    top_k, hidden : int
        Experts per token; hidden size, elements.

    Returns
    -------
    Quantity
        7,585,792 for 128 tokens, top-8, hidden 7168 (fp8 with scales and 16 bytes of control per message).

    Source: deepseek-ai/DeepEP dd758caf `tests/legacy/test_low_latency.py`.
    """
    return tokens * top_k * (token_payload_bytes(hidden, fp8=True) + INT4_BYTES)


def low_latency_combine_bytes(*, tokens: Quantity, top_k: int, hidden: int) -> Quantity:
    """Bytes that one rank receives back in DeepEP's low-latency combine, itself included.

    Parameters
    ----------
    tokens, top_k, hidden
        As for `low_latency_dispatch_bytes`.

    Returns
    -------
    Quantity
        14,680,064 for 128 tokens, top-8, hidden 7168 (bf16).

    Source: as `low_latency_dispatch_bytes`.
    """
    return tokens * top_k * token_payload_bytes(hidden, fp8=False)


def low_latency_buffer_bytes(*, max_tokens: int, hidden: int, num_experts: int) -> int:
    """Bytes of the buffer that DeepEP's low-latency kernels need on each rank.

    Parameters
    ----------
    max_tokens : int
        Most tokens that a rank dispatches at once.
    hidden, num_experts : int
        Hidden size, elements, a multiple of 128; experts of all ranks.

    Returns
    -------
    int
        2,146,961,792 for 128 tokens, hidden 7168, 288 experts: two send, two receive and two signal buffers.

    Source: deepseek-ai/DeepEP dd758caf `csrc/legacy/config.hpp` (get_low_latency_rdma_size_hint).
    """
    scales = hidden // FP8_SCALE_WIDTH
    dispatched = INT4_BYTES + max(hidden * BF16_BYTES, hidden + scales * FP32_BYTES)
    combined = scales * 2 * BF16_BYTES + hidden * BF16_BYTES
    send = max_tokens * max(dispatched, num_experts * combined)
    receive = num_experts * max_tokens * max(dispatched, combined)
    signals = -(-num_experts * FP32_BYTES // BUFFER_ALIGNMENT_BYTES) * BUFFER_ALIGNMENT_BYTES
    total = 2 * (send + receive + signals)
    return (total + BUFFER_ALIGNMENT_BYTES) // BUFFER_ALIGNMENT_BYTES * BUFFER_ALIGNMENT_BYTES


def normal_buffer_bytes(*, hidden: int, ranks: Quantity, nodes: Quantity, sms: int) -> Quantity:
    """Bytes of the buffers that DeepEP's normal kernels allocate once on each rank.

    Parameters
    ----------
    hidden : int
        Elements of a bf16 token.
    ranks, nodes : Quantity
        Ranks of the group, scale-up domains that it spans.
    sms : int
        Multiprocessors that the kernels occupy; two make a channel.

    Returns
    -------
    Quantity
        At hidden 7168 and 20 multiprocessors 335,709,824 for 8 ranks of one node; 377,677,824 + 336,047,360 for 64
        ranks of 8 nodes.

    Notes
    -----
    A1. Group sizes that DeepEP's tables do not name take the slots of the next larger one.

    Source: deepseek-ai/DeepEP dd758caf `csrc/legacy/config.hpp` (size hints), `deep_ep/buffers/legacy.py` (tables).
    """
    channels = sms // 2
    spans = np.greater(nodes, 1)
    peers = np.where(spans, NVL_PEERS, np.minimum(ranks, NVL_PEERS))
    place = np.searchsorted(NVL_CHUNK_RANKS, np.asarray(ranks)).clip(max=len(NVL_CHUNK_RANKS) - 1)
    slots = np.array(NVL_CHUNK_TOKENS)[place]
    token = hidden * BF16_BYTES + SOURCE_META_BYTES + BUFFER_MAX_TOPK * (INDEX_BYTES + FP32_BYTES)
    token += BUFFER_MAX_SCALES * FP32_BYTES
    inside = channels * peers * (slots * token + (2 * nodes + 3) * FP32_BYTES)
    across = channels * nodes * 2 * (RDMA_CHUNK_TOKENS * (token + INT4_BYTES) + (2 * NVL_PEERS + 2) * FP32_BYTES)
    return _aligned(inside) + np.where(spans, _aligned(across), 0.0)


def _aligned(size_bytes: Quantity) -> Quantity:
    """Round a size up to whole 128 bytes."""
    return np.ceil(size_bytes / BUFFER_ALIGNMENT_BYTES) * BUFFER_ALIGNMENT_BYTES
