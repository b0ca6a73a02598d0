"""How fast plans are priced, printed beside a per-plan loop in the same run; nothing here fails for being slow.

    python -m pytest tests/benchmarks --benchmark-enable --benchmark-only

Without `--benchmark-enable` each function but the command runs once on a small job, so that it cannot rot.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from ap_search import search
from ap_search.cost.context import CostContext
from ap_search.cost.details import price_plan
from ap_search.plan.table import PlanTable
from ap_search.search.domains import search_domains
from ap_search.search.engine import price_in_chunks
from ap_search.search.layouts import LayoutMaker
from ap_search.search.rules import RuleContext
from ap_search.search.space import build_table
from ap_search.spec.cluster import load_cluster
from ap_search.spec.make_job import make_job
from ap_search.spec.model import load_model
from ap_search.spec.profiles import load_software

LOOP_PLANS = 30
LOOP_PLANS_WHEN_OFF = 3
ROUNDS = 3
KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Size:
    """A job: the one that is measured, or a small one where benchmarks are switched off."""

    model: str
    devices: int


@pytest.fixture
def size(benchmark: BenchmarkFixture) -> Size:
    return Size("toy-moe", 4) if benchmark.disabled else Size("deepseek-v3", 2048)


@pytest.fixture
def say(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Print past pytest's capture, where benchmarks are switched on."""

    def past_capture(text: str) -> None:
        if not benchmark.disabled:
            with capsys.disabled():
                print(f"\n{text}")

    return past_capture


def contexts(size: Size) -> tuple[RuleContext, CostContext]:
    model, machine = load_model(size.model), load_cluster("h100-sxm")
    job = make_job(machine=machine, model=model, devices=size.devices)
    cost = CostContext(model=model, machine=machine, software=load_software("default"), job=job)
    return RuleContext(model=model, machine=machine, job=job), cost


def whole_space(rules: RuleContext) -> PlanTable:
    layouts = LayoutMaker(rules.model, rules.job.seq_len)
    return build_table(rules, search_domains(rules), layout_for=layouts).table


def unlimited(cost: CostContext) -> CostContext:
    """The same job on devices that hold anything: every plan is timed, not only those that fit."""
    return replace(cost, job=replace(cost.job, memory_limit_bytes=2**62))


@pytest.mark.parametrize("every", [False, True], ids=["as-a-search-does", "every-plan-timed"])
def test_plans_per_second(benchmark: BenchmarkFixture, size: Size, say: Callable[[str], None], *, every: bool) -> None:
    """A search times the plans that fit; timing all of them is the harder figure."""
    rules, cost = contexts(size)
    cost = unlimited(cost) if every else cost
    table = whole_space(rules)
    price = benchmark.pedantic(price_in_chunks, (cost, table, lambda *_: None), rounds=ROUNDS, warmup_rounds=1)

    count = LOOP_PLANS_WHEN_OFF if benchmark.disabled else LOOP_PLANS
    rows = np.linspace(0, len(table) - 1, count).astype(np.int64)
    started = perf_counter()
    alone = [price_plan(cost, table.row(int(row))) for row in rows]
    loop_per_s = len(rows) / (perf_counter() - started)

    timed = np.isfinite(price.step_s[rows])
    assert timed.any()
    assert price.step_s[rows][timed] == pytest.approx([one.step_time_s for one in np.array(alone)[timed]], rel=1e-9)
    if not benchmark.disabled:
        table_per_s = len(table) / benchmark.stats.stats.min
        benchmark.extra_info |= {"plans": len(table), "plans_per_s": table_per_s, "loop_plans_per_s": loop_per_s}
        say(
            f"{size.model} on {size.devices} devices, {len(table):,} plans, {np.isfinite(price.step_s).sum():,} timed: "
            f"{table_per_s:,.0f} plans/s in arrays, {loop_per_s:,.0f} plans/s in a loop over {len(rows)} of them: "
            f"{table_per_s / loop_per_s:,.0f} times as many"
        )


def test_whole_search(benchmark: BenchmarkFixture, size: Size, say: Callable[[str], None]) -> None:
    """Enumerate, price, rank, explain."""
    result = benchmark.pedantic(search, kwargs={"model": size.model, "devices": size.devices}, rounds=ROUNDS)
    assert result.plans
    if not benchmark.disabled:
        benchmark.extra_info |= {"candidates": result.search.candidates, "priced": result.search.priced}
        say(f"search of {result.search.candidates:,} candidates: {benchmark.stats.stats.min:.2f} s")


def test_command(benchmark: BenchmarkFixture, size: Size, say: Callable[[str], None]) -> None:
    """The command as a user starts it, Python's own start included, and the most memory it ever held."""
    if benchmark.disabled:
        pytest.skip("starting the command takes seconds, which are worth it where they are measured")
    command = [sys.executable, "-m", "ap_search", "--model", size.model, "--devices", str(size.devices), "--json", "-"]
    done = benchmark.pedantic(subprocess.run, (command,), {"capture_output": True, "check": True}, rounds=ROUNDS)
    assert json.loads(done.stdout)["plans"]
    if not benchmark.disabled:
        unit = MIB if sys.platform == "darwin" else KIB
        peak_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / unit
        benchmark.extra_info |= {"peak_mib": peak_mib}
        say(f"command: {benchmark.stats.stats.min:.2f} s, at most {peak_mib:,.0f} MiB")
