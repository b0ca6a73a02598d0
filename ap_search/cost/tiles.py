"""Matrix products in tiles and waves: what a device with so many multiprocessors needs for whole tiles; seconds."""

import numpy as np

from ap_search.spec.machine import TileFit
from ap_search.units import Quantity

# Rows and columns of a result tile; kernels are tuned, so the fastest counts.
TILES = ((64, 128), (128, 128), (128, 256), (256, 128))
FULL_TILE = 128 * 256


def tiled_s(
    tile: TileFit,
    *,
    flops_per_s: Quantity,
    sm_count: int,
    groups: Quantity,
    m: Quantity,
    n: Quantity,
    inner: Quantity,
) -> Quantity:
    """Compute time of `groups` products (m, inner) x (inner, n) by the fastest tile, seconds.

    Parameters
    ----------
    tile : TileFit
        How much efficiency a small tile loses.
    flops_per_s : Quantity
        What the device reaches with full tiles on every multiprocessor.
    sm_count : int
        Multiprocessors.
    groups, m, n, inner : Quantity
        Products, rows and columns of each result, inner width (what starting and ending a tile costs included).

    Returns
    -------
    Quantity
        Waves over all multiprocessors, each tile `2 bm bn inner` operations at `(bm bn / 32768)^q` of the speed.

    Notes
    -----
    A1. A tile that is not full costs as much as a full one, and so does a wave.

    Source: our reading of ai-dynamo/aiconfigurator tables, docs/cost-model/grouped-gemm.md.
    """
    best: Quantity = np.inf
    for height, width in TILES:
        area = height * width
        waves = np.ceil(groups * np.ceil(np.divide(m, height)) * np.ceil(np.divide(n, width)) / sm_count)
        rate = flops_per_s / sm_count * (area / FULL_TILE) ** tile.small_tile_exponent
        best = np.minimum(best, waves * (2.0 * area / rate))
    return best * inner
