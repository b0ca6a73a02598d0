"""Expert capacity: how many token copies an expert takes from one source rank, what is dropped, what is padded."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ap_search.spec.blocks import MoeFfn
from ap_search.spec.job import Job, Load
from ap_search.units import Quantity

FloatArray = NDArray[np.float64]


def expert_capacity(*, tokens: Quantity, top_k: int, num_experts: int, factor: float) -> Quantity:
    """Token copies that one expert takes from one source rank at most, a count.

    Parameters
    ----------
    tokens : Quantity
        Tokens of the source rank before dispatch.
    top_k, num_experts : int
        Experts per token, experts of the layer.
    factor : float
        Capacity factor, above 0.

    Returns
    -------
    Quantity
        `ceil(T k / E * factor)`: 1280 for 4096 tokens, top-2 of 8, 1.25.

    Source: Megatron-LM d98e8a64 `moe_utils.py` (get_capacity).
    """
    return np.ceil(np.multiply(tokens, top_k) / num_experts * factor)


def kept_ratio(job: Job, moe: MoeFfn, *, row: int, tokens: FloatArray) -> FloatArray:
    """Share of token copies that capacity lets through, per plan, 0..1.

    Parameters
    ----------
    job : Job
        Capacity factor and load.
    moe : MoeFfn
        Experts, top-k.
    row : int
        Row of the load.
    tokens : FloatArray
        Tokens of a source rank, per plan.

    Returns
    -------
    FloatArray
        1 without a capacity factor; else the sum over experts of what does not exceed capacity.

    Notes
    -----
    A1. Every source rank's tokens fall on experts as the load says, unless loads per source rank are known.
    A2. A capacity above the tokens of a rank drops nothing: no expert can get more.

    Source: Megatron-LM d98e8a64 `moe_utils.py` (apply_router_token_dropping).
    """
    if job.capacity_factor <= 0:
        return np.ones(len(tokens))
    shares = _source_shares(job.load, moe, row)
    distinct, inverse = np.unique(tokens, return_inverse=True)
    capacity = expert_capacity(
        tokens=distinct, top_k=moe.top_k, num_experts=moe.num_experts, factor=job.capacity_factor
    )
    bound = np.where(capacity > distinct, np.inf, capacity / (distinct * moe.top_k))
    dropped = np.maximum(shares[None] - bound[:, None, None], 0.0).sum(axis=(1, 2)) / len(shares)
    ratio: FloatArray = (1.0 - dropped)[inverse]
    return ratio


def padded_capacity(job: Job, moe: MoeFfn, tokens: FloatArray) -> FloatArray:
    """Slots per source rank and expert where experts' inputs are padded to capacity, per plan; 0 where they are not.

    Parameters
    ----------
    job : Job
        Capacity factor, and whether inputs are padded to it.
    moe : MoeFfn
        Experts, top-k.
    tokens : FloatArray
        Tokens of a source rank, per plan.

    Returns
    -------
    FloatArray
        `expert_capacity` or 0. Each local expert then processes capacity x etp x ep rows, whatever the load.

    Source: Megatron-LM d98e8a64 `token_dispatcher.py` (drop_and_pad).
    """
    if not job.pad_to_capacity:
        return np.zeros(len(tokens))
    return np.asarray(
        expert_capacity(tokens=tokens, top_k=moe.top_k, num_experts=moe.num_experts, factor=job.capacity_factor)
    )


def kept_load(job: Job, moe: MoeFfn | None) -> Load:
    """Load of experts after capacity: what exceeds it is dropped; balanced where inputs are padded to capacity.

    Parameters
    ----------
    job : Job
        Capacity factor and load.
    moe : MoeFfn or None
        Experts, top-k; None for a dense model.

    Returns
    -------
    Load
        Shares of the copies that are kept, each row summing to 1.

    Notes
    -----
    A1. Capacity's rounding up to whole copies is left out here: it moves a rank's share by less than a copy per expert.

    Source: as `kept_ratio`.
    """
    load, factor = job.load, job.capacity_factor
    if factor <= 0 or load.shares is None or moe is None:
        return load
    if job.pad_to_capacity:
        return Load(name=load.name, shares=np.full(load.shares.shape, 1.0 / moe.num_experts))
    if factor * moe.top_k > moe.num_experts:
        return load
    bound = factor / moe.num_experts
    if load.source_shares is None:
        return replace(load, shares=_clipped(load.shares, bound))
    sources = _clipped(load.source_shares, bound / load.source_shares.shape[1])
    return replace(load, shares=sources.sum(axis=1), source_shares=sources)


def _source_shares(load: Load, moe: MoeFfn, row: int) -> FloatArray:
    """Shares of experts in what each source rank sends, shape (sources, experts); one source where they are alike."""
    if load.source_shares is not None:
        count = load.source_shares.shape[1]
        sources: FloatArray = load.source_shares[row] * count
        return sources
    if load.shares is not None:
        return load.shares[row : row + 1]
    return np.full((1, moe.num_experts), 1.0 / moe.num_experts)


def _clipped(shares: FloatArray, bound: float) -> FloatArray:
    """Cut shares at a bound and scale each row back to a sum of 1; rows that nothing exceeds stay as they are."""
    cut = np.minimum(shares, bound)
    axes = tuple(range(1, shares.ndim))
    whole = cut.sum(axis=axes, keepdims=True)
    over = (shares > bound).any(axis=axes, keepdims=True)
    return np.where(over, cut / whole, shares)
