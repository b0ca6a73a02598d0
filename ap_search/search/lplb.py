"""LPLB's balance of one batch as a linear program: how low the busiest rank comes over a fixed graph of copies."""

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def lplb_min_max(loads: FloatArray, edges: IntArray, capacities: FloatArray) -> float:
    """Find the smallest load that the busiest rank can have when tokens may move along edges.

    Parameters
    ----------
    loads : FloatArray
        Load of each rank before anything moves, shape (ranks,), at least 0, in tokens or shares.
    edges : IntArray
        Rank that holds an expert and rank that holds its copy, shape (edges, 2).
    capacities : FloatArray
        Load of the copied expert, shape (edges,): no more than it can move along its edge.

    Returns
    -------
    float
        The least maximum, in the unit of `loads`.

    Raises
    ------
    ArithmeticError
        Where the solver finds no optimum, which no such problem should lead to.

    Notes
    -----
    A1. Token counts are balanced, not the time of the experts' products.
    A2. Loads may be split anywhere: a batch has many tokens per edge.

    Source: deepseek-ai/LPLB `README.md` (edge capacities, least maximum load).
    """
    # OR-Tools takes a while to import, which no other placement needs to wait for.
    from ortools.linear_solver import pywraplp  # noqa: PLC0415

    scale = float(loads.max())
    if scale <= 0.0 or not len(edges):
        return scale
    solver = pywraplp.Solver.CreateSolver("GLOP")
    top = solver.NumVar(float(loads.mean() / scale), 1.0, "top")
    # A rank's load less what leaves it plus what reaches it stays below the top.
    ranks = [solver.Constraint(float(load / scale), solver.infinity()) for load in loads]
    for rank in ranks:
        rank.SetCoefficient(top, 1.0)
    for (source, target), capacity in zip(edges.tolist(), capacities.tolist(), strict=True):
        moved = solver.NumVar(0.0, capacity / scale, "")
        ranks[source].SetCoefficient(moved, 1.0)
        ranks[target].SetCoefficient(moved, -1.0)
    solver.Objective().SetCoefficient(top, 1.0)
    solver.Objective().SetMinimization()
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        raise ArithmeticError(f"no optimum for {len(loads)} ranks and {len(edges)} edges")
    least: float = top.solution_value() * scale
    return least
