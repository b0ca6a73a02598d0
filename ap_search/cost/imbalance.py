"""Imbalance: how much more than its share the busiest expert-parallel rank receives."""

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


def worst_rank_ratio(shares: FloatArray, ep: int) -> FloatArray:
    """Load of the busiest expert-parallel rank over the mean of all, per row of shares; 1 is balanced.

    Parameters
    ----------
    shares : FloatArray
        Shares of routed token copies per expert, shape (rows, num_experts), at least 0, no row all zero.
    ep : int
        Expert-parallel degree, 1 to num_experts.

    Returns
    -------
    FloatArray
        Shape (rows,), 1 to ep; exactly 1 for equal shares and for ep = 1.

    Notes
    -----
    A1. Rank j holds the consecutive experts `j*E/ep ... (j+1)*E/ep - 1`. An ep that does not divide the experts, which
    a rule refuses, is cut at the whole experts below.
    A2. One histogram, summed over the group, stands for every micro-batch; layers are not averaged here, since a layer
    waits for its own busiest rank.

    Source: Megatron-LM `transformer/moe/moe_layer.py` (consecutive local experts); docs/cost-model/imbalance.md.
    """
    starts = np.arange(ep) * shares.shape[-1] // ep
    loads = np.add.reduceat(shares, starts, axis=-1)
    most = loads.max(axis=-1)
    # The mean of equal loads may differ from them by rounding; balanced must cost exactly nothing.
    ratios: FloatArray = np.where(most == loads.min(axis=-1), 1.0, np.maximum(most * ep / loads.sum(axis=-1), 1.0))
    return ratios
