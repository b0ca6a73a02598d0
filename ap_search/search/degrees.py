"""Degrees as a CP-SAT model, to which rules are posted, each under its own literal; no other module uses OR-Tools.

Each degree is written by the exponents of its primes, so that products of degrees become sums.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ap_search.plan.table import IntArray
from ap_search.search.rules import MESH_AXES, Rule, RuleContext
from ap_search.search.tables import legality

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

_SEED = 1
_FEWER_FIRST = 10**6
MAX_TABLE_ROWS = 4096


class DegreeModel:
    """Axes and knobs as solver variables, and rules over them; a rule is posted through the methods of `MeshPoster`.

    Parameters
    ----------
    candidates : dict of str to tuple of int
        Values per axis or knob, none empty. Mesh axes are written by prime exponents, knobs by their value.
    devices : int
        Devices of the job: its primes are always among those written.
    """

    def __init__(self, candidates: dict[str, tuple[int, ...]], *, devices: int) -> None:
        # OR-Tools takes most of a second to import, which `--help` and a bad flag need not wait for.
        from ortools.sat.python import cp_model  # noqa: PLC0415

        self._cp_model = cp_model
        self._model = cp_model.CpModel()
        self._candidates = candidates
        degrees = [value for axis in candidates if axis in MESH_AXES for value in candidates[axis]]
        self._primes = _primes([devices, *degrees])
        self._codes = {axis: self._code(axis, values) for axis, values in candidates.items()}
        self._variables = {axis: self._add_axis(axis) for axis in candidates}
        self._literals: list[cp_model.IntVar] = []

    def _add_axis(self, axis: str) -> list["cp_model.IntVar"]:
        """Make the variables of one axis and allow its candidates."""
        codes = self._codes[axis]
        variables = [
            self._model.new_int_var(int(column.min()), int(column.max()), f"{axis}_{index}")
            for index, column in enumerate(codes.T)
        ]
        self._model.add_allowed_assignments(variables, codes.tolist())
        return variables

    def _code(self, axis: str, values: Sequence[int]) -> IntArray:
        """Write values, a row each: the exponents of its primes for a degree, itself for a knob."""
        if axis in MESH_AXES:
            return np.array([[_exponent(value, prime) for prime in self._primes] for value in values], dtype=np.int64)
        return np.array(values, dtype=np.int64)[:, None]

    def post(self, context: RuleContext, rule: Rule) -> int:
        """Post a rule under a new literal; return the literal's number."""
        number = self._new_literal(rule.id)
        if rule.post is not None:
            rule.post(context, self)
        else:
            self._tabulate(context, rule)
        return number

    def restrict(self, name: str, axis: str, values: Iterable[int]) -> int:
        """Restrict an axis to some of its candidates under a new literal; return the literal's number."""
        number = self._new_literal(name)
        allowed = set(values)
        self.keep(axis, lambda value: value in allowed)
        return number

    def _new_literal(self, name: str) -> int:
        """Make the literal that enforces what is posted next."""
        self._literals.append(self._model.new_bool_var(name))
        return len(self._literals) - 1

    def keep(self, axis: str, legal: Callable[[int], bool]) -> None:
        """Demand a value of `axis` for which `legal` is true."""
        self._allow((axis,), np.argwhere([legal(value) for value in self._candidates[axis]]))

    def divide(self, axes: tuple[str, ...], value: int) -> None:
        """Demand that the product of `axes` divides `value`."""
        for index, prime in enumerate(self._primes):
            self._enforce(self._exponent_sum(axes, index) <= _exponent(value, prime))

    def equal(self, axes: tuple[str, ...], value: int) -> None:
        """Demand that the product of `axes` is `value`."""
        for index, prime in enumerate(self._primes):
            self._enforce(self._exponent_sum(axes, index) == _exponent(value, prime))

    def tile(self, axes: tuple[str, ...], whole: tuple[str, ...]) -> None:
        """Demand that the product of `axes` divides the product of `whole`."""
        for index in range(len(self._primes)):
            self._enforce(self._exponent_sum(axes, index) <= self._exponent_sum(whole, index))

    def _exponent_sum(self, axes: tuple[str, ...], prime_index: int) -> Any:
        """Write the exponent of one prime in the product of some axes."""
        return sum(self._variables[axis][prime_index] for axis in axes)

    def _enforce(self, constraint: Any) -> None:
        """Demand a linear constraint where the newest literal is true."""
        self._model.add(constraint).only_enforce_if(self._literals[-1])

    def _allow(self, axes: Sequence[str], rows: IntArray) -> None:
        """Demand one row of some axes, given by places in their candidates, where the newest literal is true."""
        if not len(rows):
            self._model.add_bool_and([~self._literals[-1]])
        elif axes:
            self._add_table([variable for axis in axes for variable in self._variables[axis]], self._coded(axes, rows))

    def _coded(self, axes: Sequence[str], rows: IntArray) -> IntArray:
        """Write rows of places in the candidates by the values of the variables, shape (rows, variables)."""
        return np.concatenate([self._codes[axis][rows[:, index]] for index, axis in enumerate(axes)], axis=1)

    def _add_table(self, variables: Sequence["cp_model.IntVar"], rows: IntArray) -> None:
        """Demand one of the rows of values, where the newest literal is true."""
        self._model.add_allowed_assignments(variables, rows.tolist()).only_enforce_if(self._literals[-1])

    def _tabulate(self, context: RuleContext, rule: Rule) -> None:
        """Allow the combinations of what a rule reads where it holds; one that holds everywhere says nothing."""
        axes, legal = legality(context, rule, self._candidates)
        if legal.all():
            return
        if legal.sum() > MAX_TABLE_ROWS and len(axes) > 1:
            self._allow_by_class(axes, legal)
        else:
            self._allow(axes, np.argwhere(legal))

    def _allow_by_class(self, axes: Sequence[str], legal: NDArray[np.bool_]) -> None:
        """Allow a large table by two small ones: the other axes give a class, the class the values of the longest axis.

        Rows of the other axes with the same legal values of the longest axis are one class; those without any are left
        out.
        """
        longest = int(np.argmax(legal.shape))
        others = [axis for axis in axes if axis != axes[longest]]
        table = np.moveaxis(legal, longest, -1)
        rows = np.argwhere(table.any(axis=-1))
        classes, number = np.unique(table[tuple(rows.T)], axis=0, return_inverse=True)
        kind = self._model.new_int_var(0, max(len(classes) - 1, 0), f"class_{len(self._literals)}")
        joined = [variable for axis in others for variable in self._variables[axis]]
        self._add_table([*joined, kind], np.column_stack([self._coded(others, rows), number.ravel()]))
        pairs = np.argwhere(classes)
        coded = self._coded([axes[longest]], pairs[:, 1:])
        self._add_table([kind, *self._variables[axes[longest]]], np.column_stack([pairs[:, 0], coded]))

    def enumerate(self) -> IntArray:
        """List all assignments of the mesh axes under which everything posted holds, shape (assignments, axes)."""
        self._model.add_bool_and(self._literals)
        variables = [variable for each in self._variables.values() for variable in each]
        rows: list[list[int]] = []

        class Collector(self._cp_model.CpSolverSolutionCallback):  # type: ignore[name-defined,misc]
            def on_solution_callback(self) -> None:
                rows.append([self.value(variable) for variable in variables])

        solver = self._new_solver(presolve=True)
        solver.parameters.enumerate_all_solutions = True
        solver.solve(self._model, Collector())
        exponents = np.array(rows, dtype=np.int64).reshape(len(rows), len(self._variables), len(self._primes))
        degrees: IntArray = np.prod(np.array(self._primes, dtype=np.int64) ** exponents, axis=2)
        return degrees

    def clash(self, literals: Iterable[int]) -> tuple[int, ...] | None:
        """Name some of these literals that cannot be true together (CP-SAT's assumptions), or None where all can."""
        solver = self._solve_assuming(literals)
        if solver is None:
            return None
        number = {literal.index: index for index, literal in enumerate(self._literals)}
        return tuple(sorted(number[index] for index in solver.sufficient_assumptions_for_infeasibility()))

    def _solve_assuming(self, literals: Iterable[int]) -> "cp_model.CpSolver | None":
        """Solve with some literals true; give the solver where that is infeasible."""
        self._model.clear_assumptions()
        self._model.add_assumptions([self._literals[number] for number in literals])
        solver = self._new_solver()
        return solver if solver.solve(self._model) == self._cp_model.INFEASIBLE else None

    def unmet(self, literals: Iterable[int]) -> tuple[int, ...]:
        """Name the fewest literals that must be false where these, which can, are all true."""
        model = self._model.clone()
        model.clear_assumptions()
        model.add_bool_and([self._literals[number] for number in literals])
        model.maximize(sum(self._literals))
        solver = self._new_solver()
        solver.solve(model)
        return tuple(number for number, literal in enumerate(self._literals) if not solver.boolean_value(literal))

    def _new_solver(self, *, presolve: bool = False) -> "cp_model.CpSolver":
        """Make a solver whose answer does not depend on threads or chance; presolving tables outlasts most answers."""
        solver = self._cp_model.CpSolver()
        solver.parameters.cp_model_presolve = presolve
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = _SEED
        return solver


def smallest_hitting_set(sets: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Choose the fewest numbers such that each set holds one of them; of several choices, the lowest numbers."""
    from ortools.sat.python import cp_model  # noqa: PLC0415 - as above

    model = cp_model.CpModel()
    chosen = {number: model.new_bool_var(str(number)) for number in sorted({n for each in sets for n in each})}
    for each in sets:
        model.add_bool_or([chosen[number] for number in each])
    model.minimize(sum((_FEWER_FIRST + number) * literal for number, literal in chosen.items()))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = _SEED
    solver.solve(model)
    return tuple(number for number, literal in chosen.items() if solver.boolean_value(literal))


def _exponent(value: int, prime: int) -> int:
    """Count how often a prime divides a positive value."""
    count = 0
    while value % prime == 0:
        value //= prime
        count += 1
    return count


def _primes(values: Iterable[int]) -> tuple[int, ...]:
    """List the primes that divide any of the values, ascending; at least one, so that every axis has a variable."""
    found = {2}
    for value in set(values):
        rest, factor = value, 2
        while factor * factor <= rest:
            while rest % factor == 0:
                found.add(factor)
                rest //= factor
            factor += 1
        if rest > 1:
            found.add(rest)
    return tuple(sorted(found))
