"""Complete some columns of a plan table with everything that follows from them."""

from collections.abc import Callable, Mapping

import numpy as np

from ap_search.plan.layout import layout_of
from ap_search.plan.plan import Dispatcher, Layout, Plan, Schedule, Sharding
from ap_search.plan.table import IntArray, PlanTable
from ap_search.search.rules.base import RuleContext

LayoutFor = Callable[[int, int], Layout | None]
"""How a search lays layers on pp stages of vpp chunks; None leaves it to `simple_layout`."""

_DEFAULTS = {
    "tp": 1, "cp": 1, "pp": 1, "vpp": 1, "ep": 1, "etp": 1, "mbs": 1, "recompute": 0,
    "sharding": int(Sharding.ZERO1), "dispatcher": int(Dispatcher.ALLTOALL), "schedule": int(Schedule.ONE_F_ONE_B),
}  # fmt: skip


def simple_layout(num_layers: int, pp: int, vpp: int) -> Layout:
    """Lay layers as evenly as whole layers can be, the first virtual stages one more where they do not divide.

    Parameters
    ----------
    num_layers : int
        Decoder layers.
    pp, vpp : int
        Pipeline stages, and chunks on each.

    Returns
    -------
    Layout
        With empty stages where there are more virtual stages than layers.
    """
    layers, rest = divmod(num_layers, pp * vpp)
    return layout_of((layers + 1,) * rest + (layers,) * (pp * vpp - rest), pp=pp, vpp=vpp)


def complete(
    context: RuleContext, given: Mapping[str, IntArray], *, rows: int, layout_for: LayoutFor | None = None
) -> PlanTable:
    """Fill a plan table from some of its columns.

    Parameters
    ----------
    context : RuleContext
        Devices and batch, from which dp, edp and the number of micro-batches follow where they are not given.
    given : mapping of str to array of int, shape (rows,)
        Columns by name; axes left out are 1, knobs left out take the defaults of a plan.
    rows : int
        Plans.
    layout_for : callable or None
        Layout of each pair (pp, vpp); None lays layers out simply.

    Returns
    -------
    PlanTable

    Notes
    -----
    A1. `dp = devices // (tp*cp*pp)` and `edp = dp*cp*tp // (ep*etp)`, at least 1; the rules of the two worlds
    judge whether they are whole.
    A2. Sequence parallelism is on where tp > 1, as Megatron-LM demands for MoE and advises for dense models.
    """
    column = {name: np.broadcast_to(np.int64(value), rows) for name, value in _DEFAULTS.items()}
    column.update(given)
    devices, batch = context.job.devices, context.job.global_batch
    column.setdefault("dp", np.maximum(devices // (column["tp"] * column["cp"] * column["pp"]), 1))
    column.setdefault(
        "edp", np.maximum(column["dp"] * column["cp"] * column["tp"] // (column["ep"] * column["etp"]), 1)
    )
    column.setdefault("num_microbatches", np.maximum(batch // (column["mbs"] * column["dp"]), 1))
    column.setdefault("sequence_parallel", (column["tp"] > 1).astype(np.int64))
    layouts, layout = _layouts(context, column, layout_for)
    return PlanTable(**column, layout=layout, layouts=layouts)


def _layouts(
    context: RuleContext, column: Mapping[str, IntArray], layout_for: LayoutFor | None
) -> tuple[tuple[Layout, ...], IntArray]:
    """Make the layout of each distinct pair (pp, vpp), and the column that indexes them (without sorting the plans)."""
    width = int(column["vpp"].max(initial=0)) + 1
    codes = column["pp"] * width + column["vpp"]
    present = np.zeros(int(codes.max(initial=0)) + 1, dtype=np.bool_)
    present[codes] = True
    pairs = [divmod(int(code), width) for code in np.flatnonzero(present)]
    made = [
        (layout_for(pp, vpp) if layout_for else None) or simple_layout(context.model.num_layers, pp, vpp)
        for pp, vpp in pairs
    ]
    return tuple(made), (np.cumsum(present) - 1)[codes]


def vary(context: RuleContext, plan: Plan, *, axis: str, values: IntArray) -> PlanTable:
    """Make one plan per value of an axis or knob; what follows from it is derived anew.

    Parameters
    ----------
    context : RuleContext
        Devices and batch.
    plan : Plan
        All else is as in this plan.
    axis : str
        One of tp cp pp dp ep etp vpp mbs or a knob.
    values : array of int, shape (values,)
        Degrees, or the numbers of an enumeration.

    Returns
    -------
    PlanTable
        One row per value.

    Notes
    -----
    A1. Changing vpp or schedule takes the other along, where one demands the other: vpp > 1 is interleaved.
    A2. The plan's own layout stays unless pp or vpp change.
    """
    names = [*_DEFAULTS, "sequence_parallel"]
    given: dict[str, IntArray] = {
        name: np.full(len(values), int(getattr(plan, name)), dtype=np.int64) for name in names
    }
    given[axis] = values
    if axis == "vpp":
        given["schedule"] = np.where(values > 1, int(Schedule.INTERLEAVED), _flat_schedule(plan))
    if axis == "tp":
        given["sequence_parallel"] = (values > 1).astype(np.int64)
    same_layout = axis not in ("pp", "vpp")
    return complete(context, given, rows=len(values), layout_for=(lambda pp, vpp: plan.layout) if same_layout else None)


def _flat_schedule(plan: Plan) -> int:
    """Tell the schedule that the plan would have with one chunk per stage."""
    interleaved = plan.schedule is Schedule.INTERLEAVED
    return int(Schedule.ONE_F_ONE_B if interleaved else plan.schedule)
