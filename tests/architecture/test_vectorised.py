"""Plans are priced in arrays: no loop over plans in cost/, in the source or in what is executed."""

import ast
import re
import sys
from collections.abc import Callable
from types import FrameType

import numpy as np
import pytest

from ap_search.cost.context import CostContext
from ap_search.cost.step import price_table
from ap_search.plan.plan import Dispatcher, Plan, Recompute, Schedule, Sharding
from ap_search.plan.table import PlanTable
from ap_search.search.rules.columns import simple_layout
from ap_search.spec.cluster import load_cluster
from ap_search.spec.make_job import make_job
from ap_search.spec.model import load_model
from ap_search.spec.profiles import load_software
from tests.architecture.source import modules_of, report

# What holds one entry per plan. Distinct values of it (np.unique, plan_rows) may be looped over.
PER_PLAN = re.compile(r"\b(table|plans)\b(?!\.layouts)|\bgroup\.rows\b|\blen\(rows\)")
DISTINCT = re.compile(r"np\.unique\(|plan_rows\(|\.layouts\b")
BANNED = {"np.vectorize", "np.nditer", "np.ndenumerate", "np.apply_along_axis", "np.frompyfunc"}


def test_no_loop_over_plans_stands_in_a_kernel() -> None:
    """No `for` or comprehension runs over a table, its rows or its length."""
    faults = []
    for module in modules_of("cost"):
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.For | ast.comprehension) or isinstance(node.iter, ast.Tuple | ast.List):
                continue
            text = ast.unparse(node.iter)
            if PER_PLAN.search(text) and not DISTINCT.search(text):
                faults.append(f"{module.path}:{node.iter.lineno} loops over {text}")
    assert not faults, report(faults)


def test_no_kernel_hides_a_loop() -> None:
    """numpy's own loops over Python functions are loops."""
    faults = [
        f"{module.path}:{node.lineno} calls {ast.unparse(node.func)}"
        for module in modules_of("cost")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in BANNED
    ]
    assert not faults, report(faults)


def _context() -> CostContext:
    """DeepSeek-V3 on 64 H100."""
    model, machine = load_model("deepseek-v3"), load_cluster("h100-sxm")
    job = make_job(machine=machine, model=model, devices=64, global_batch=512)
    return CostContext(model=model, machine=machine, software=load_software("default"), job=job)


def _table(context: CostContext, copies: int) -> PlanTable:
    """Eight different plans, each `copies` times."""
    plans = [
        Plan(
            pp=4,
            dp=16,
            ep=ep,
            edp=16 // ep,
            num_microbatches=32,
            sharding=sharding,
            recompute=recompute,
            dispatcher=Dispatcher.DEEPEP,
            schedule=Schedule.ONE_F_ONE_B,
            layout=simple_layout(context.model.num_layers, 4, 1),
        )
        for ep in (8, 16)
        for sharding in (Sharding.ZERO1, Sharding.ZERO3)
        for recompute in (Recompute.NONE, Recompute.FULL)
    ]
    return PlanTable.from_plans(plans).take(np.repeat(np.arange(len(plans)), copies))


def _lines_run(work: Callable[[], object]) -> int:
    """Lines of the package that are executed, each turn of a loop anew."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal count
        if not frame.f_globals.get("__name__", "").startswith("ap_search."):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_a_thousand_plans_run_no_more_lines_than_eight() -> None:
    """Pricing executes the same lines whatever the number of plans of the same shapes."""
    context = _context()
    few, many = _table(context, 1), _table(context, 125)
    assert len(many) == 125 * len(few)
    price_table(context, few)
    assert _lines_run(lambda: price_table(context, many)) == _lines_run(lambda: price_table(context, few))


def test_a_loop_over_plans_would_be_noticed() -> None:
    """The count above grows with a loop, a comprehension and a call per plan."""
    table = _table(_context(), 2)
    counts = [_lines_run(lambda size=size: [table.row(index) for index in range(size)]) for size in (1, 16)]
    assert counts[1] == 16 * counts[0] > 0


def test_one_plan_is_priced_as_among_many() -> None:
    """A row's price does not depend on its neighbours: one formula for one plan or a million."""
    context = _context()
    table = _table(context, 3)
    whole = price_table(context, table)
    for index in (0, 5, len(table) - 1):
        alone = price_table(context, table.take(np.array([index])))
        assert alone.step_s[0] == pytest.approx(whole.step_s[index], rel=1e-12)
        assert alone.peak_bytes[0] == pytest.approx(whole.peak_bytes[index], rel=1e-12)
