"""Many plans as one struct of arrays: a column per axis and knob, a row per plan."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from ap_search.plan.plan import Dispatcher, Layout, Plan, Recompute, Schedule, Sharding

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanTable:
    """Columns of plans, each an int64 array of shape (plans,); knobs hold their enumeration's value.

    `layout` indexes `layouts`; `sequence_parallel` is 0 or 1.
    """

    tp: IntArray
    cp: IntArray
    pp: IntArray
    vpp: IntArray
    dp: IntArray
    ep: IntArray
    etp: IntArray
    edp: IntArray
    mbs: IntArray
    num_microbatches: IntArray
    sequence_parallel: IntArray
    sharding: IntArray
    recompute: IntArray
    dispatcher: IntArray
    schedule: IntArray
    layout: IntArray
    layouts: tuple[Layout, ...]

    def __len__(self) -> int:
        """Count the plans."""
        return len(self.tp)

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """Names of the columns, `layouts` left out."""
        return tuple(field.name for field in fields(cls) if field.name != "layouts")

    def take(self, rows: NDArray[np.bool_] | IntArray) -> "PlanTable":
        """Select the rows of a boolean mask or an index array, in that order."""
        return replace(self, **{name: getattr(self, name)[rows] for name in self.columns()})

    def row(self, index: int) -> Plan:
        """Read one plan out of the table."""
        values = {name: int(getattr(self, name)[index]) for name in self.columns()}
        return Plan(
            **{name: values[name] for name in ("tp", "cp", "pp", "vpp", "dp", "ep", "etp", "edp", "mbs")},
            num_microbatches=values["num_microbatches"],
            sequence_parallel=bool(values["sequence_parallel"]),
            sharding=Sharding(values["sharding"]),
            recompute=Recompute(values["recompute"]),
            dispatcher=Dispatcher(values["dispatcher"]),
            schedule=Schedule(values["schedule"]),
            layout=self.layouts[values["layout"]],
        )

    @classmethod
    def from_plans(cls, plans: Sequence[Plan]) -> "PlanTable":
        """Build a table with one row per plan."""
        layouts = tuple(dict.fromkeys(plan.layout for plan in plans))
        number = {layout: index for index, layout in enumerate(layouts)}
        columns = {
            name: np.array([int(getattr(plan, name)) for plan in plans], dtype=np.int64)
            for name in cls.columns()
            if name != "layout"
        }
        return cls(**columns, layout=np.array([number[plan.layout] for plan in plans], dtype=np.int64), layouts=layouts)
