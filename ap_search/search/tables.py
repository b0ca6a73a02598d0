"""Rules as tables over candidates: where a rule holds, and which knobs no rule minds."""

import math
from collections.abc import Iterable, Iterator
from itertools import product

import numpy as np
from numpy.typing import NDArray

from ap_search.search.rules import STAGES, Rule, RuleContext
from ap_search.search.rules.columns import complete

Candidates = dict[str, tuple[int, ...]]
CHUNK_ROWS = 65_536


def legality(context: RuleContext, rule: Rule, candidates: Candidates) -> tuple[tuple[str, ...], NDArray[np.bool_]]:
    """Tell for every combination of candidates of what a rule reads whether it holds.

    Parameters
    ----------
    context : RuleContext
        Model, machine and job.
    rule : Rule
        Its margin is asked; axes that it reads but that have no candidates follow from the others.
    candidates : dict of str to tuple of int
        Values per axis or knob.

    Returns
    -------
    tuple of str
        The axes of the table, in the order of `candidates`.
    array of bool, shape (values of the first axis, ...)
        True where the margin is not negative.
    """
    axes = tuple(axis for axis in candidates if axis in rule.reads)
    shape = tuple(len(candidates[axis]) for axis in axes)
    chunks = list(_holds(context, rule, {axis: candidates[axis] for axis in axes}))
    return axes, np.concatenate(chunks).reshape(shape)


def _holds(context: RuleContext, rule: Rule, candidates: Candidates) -> Iterator[NDArray[np.bool_]]:
    """Judge the product of candidates in its order, some ten thousand combinations at a time."""
    values = {axis: np.array(each, dtype=np.int64) for axis, each in candidates.items()}
    shape = tuple(len(each) for each in values.values())
    size = math.prod(shape)
    for start in range(0, size, CHUNK_ROWS):
        rows = np.arange(start, min(start + CHUNK_ROWS, size))
        places = np.unravel_index(rows, shape) if shape else ()
        columns = {axis: each[place] for (axis, each), place in zip(values.items(), places, strict=True)}
        yield np.asarray(rule.margin(context, complete(context, columns, rows=len(rows))) >= 0)


def settle_free_knobs(
    context: RuleContext, candidates: Candidates, rules: tuple[Rule, ...], *, fixed: Iterable[str]
) -> Candidates:
    """Leave one value of each open knob that has a value which no rule ever minds.

    Parameters
    ----------
    context : RuleContext
        Model, machine and job.
    candidates : dict of str to tuple of int
        Values per axis and knob.
    rules : tuple of Rule
        All that may be asked of a plan.
    fixed : iterable of str
        Axes and knobs whose candidates the user gave; they stay.

    Returns
    -------
    dict of str to tuple of int
        The same with fewer candidates.

    Notes
    -----
    A1. Exact for any subset of the rules: a plan that obeys it obeys it with this value too. Knobs of one stage (vpp
    and its schedule) are settled together or not at all.
    """
    settled = dict(candidates)
    for axes in STAGES[1:]:
        if not set(axes) & set(fixed):
            choices = (dict(zip(axes, values, strict=True)) for values in product(*(settled[axis] for axis in axes)))
            free = (one for one in choices if _is_free(context, settled, rules, choice=one))
            settled |= {axis: (value,) for axis, value in next(free, {}).items()}
    return settled


def _is_free(context: RuleContext, candidates: Candidates, rules: tuple[Rule, ...], *, choice: dict[str, int]) -> bool:
    """Tell whether every rule on these knobs holds with these values, whatever the rest."""
    chosen = candidates | {axis: (value,) for axis, value in choice.items()}
    touched = [rule for rule in rules if set(rule.reads) & set(choice)]
    parts = ({axis: values for axis, values in chosen.items() if axis in rule.reads} for rule in touched)
    return all(holds.all() for rule, part in zip(touched, parts, strict=True) for holds in _holds(context, rule, part))
