"""Names say their unit: `_s _bytes _flops _bytes_per_s _flops_per_s _ratio`, and human units stay at the edges."""

import ast
import re

from tests.architecture.source import Callable, callables, classes, fields_of, modules, modules_of, report

NUMERIC = {"Quantity", "FloatArray", "NDArray[np.float64]", "float", "int"}
REAL = NUMERIC - {"int"}
SUFFIX = re.compile(r"(^|_)(s|bytes|flops|ratio|seconds_per_byte)(_per_[a-z_]+)?$|^seconds$")
UNIT_WORD = re.compile(r"\b(seconds?|bytes|FLOPs|floating-point operations)\b", re.IGNORECASE)
HUMAN = re.compile(r"_(gib|mib|kib|gb|mb|tb|us|ms|ns|tflops|gflops|gbit|gbyte)(_per_s)?$")

# A class whose own name says the unit of its arrays, or that they are counts, shares or codes without one.
UNIT_CLASSES = re.compile(r"(Seconds|Time|Times|Bytes|Memory)$")
COUNT_CLASSES = re.compile(r"(Params|Degrees|Shape|Shapes|Gemm|Run|Table|Loads)$")
COUNTS = re.compile(r"(^|_)tokens$")
QUANTITY_WORDS = {"time", "times", "duration", "latency", "seconds", "memory", "bandwidth", "bytes"}


def _returns(function: Callable) -> str:
    """Return annotation as written."""
    return ast.unparse(function.node.returns) if function.node.returns else ""


def test_functions_that_return_a_unit_are_named_after_it() -> None:
    """Where the first sentence says seconds, bytes or FLOPs and a number comes back, the name ends in the suffix."""
    faults = [
        f"{function.where} returns {_returns(function)}: {function.docstring.splitlines()[0]}"
        for module in modules_of("cost", "plan", "search", "result")
        for function in callables(module)
        if function.public
        and _returns(function) in NUMERIC
        and UNIT_WORD.search(function.docstring.split("\n\n")[0])
        and not SUFFIX.search(function.node.name)
        and not (function.owner and UNIT_CLASSES.search(function.owner.name))
    ]
    assert not faults, report(faults)


def test_suffixes_are_true() -> None:
    """A function named after a unit says that unit in its first sentence (seconds for _s, bytes for _bytes)."""
    said = {"_s": "second", "_bytes": "byte", "_flops": "operation"}
    faults = [
        f"{function.where}: {function.docstring.splitlines()[0]}"
        for module in modules_of("cost")
        for function in callables(module)
        if function.public and function.owner is None
        for suffix, word in said.items()
        if function.node.name.endswith(suffix) and word not in function.docstring.split("\n\n")[0].lower()
    ]
    assert not faults, report(faults)


def test_arrays_of_cost_records_say_their_unit() -> None:
    """A field's own name, or its class's, says the unit."""
    faults = []
    for module in modules_of("cost"):
        for node in classes(module):
            if COUNT_CLASSES.search(node.name):
                continue
            for name, annotation, line in fields_of(node):
                if annotation not in REAL or SUFFIX.search(name) or COUNTS.search(name):
                    continue
                # Seconds and bytes side by side: the class's name can stand for one of them only.
                if not UNIT_CLASSES.search(node.name) or name.startswith("sent"):
                    faults.append(f"{module.path}:{line} {node.name}.{name}: {annotation}")
    assert not faults, report(faults)


def test_parameters_that_hold_a_quantity_say_their_unit() -> None:
    """A numeric parameter or field named time, latency, memory, bandwidth ... ends in a suffix."""
    faults = []
    for module in modules_of("cost", "plan", "search", "result"):
        names = [
            (function.where, parameter.arg, ast.unparse(parameter.annotation))
            for function in callables(module)
            for parameter in function.parameters
            if parameter.annotation
        ]
        for node in classes(module):
            names += [(f"{module.path}:{line} {node.name}", name, hint) for name, hint, line in fields_of(node)]
        faults += [
            f"{where}: {name}"
            for where, name, hint in names
            if hint in NUMERIC and set(name.split("_")) & QUANTITY_WORDS and not SUFFIX.search(name)
        ]
    assert not faults, report(faults)


def test_human_units_stay_at_the_edges() -> None:
    """Between the layers everything is SI: no parameter, field or function below the edge is named in GiB or us."""
    faults = []
    for module in modules_of("cost", "plan", "search", "result"):
        for function in callables(module):
            if not function.public:
                continue  # a sentence for people may be put together in a helper
            names = [function.node.name, *(parameter.arg for parameter in function.parameters)]
            faults += [f"{function.where}: {name}" for name in names if HUMAN.search(name)]
        for node in classes(module):
            faults += [
                f"{module.path}:{line} {node.name}.{name}" for name, _, line in fields_of(node) if HUMAN.search(name)
            ]
    assert not faults, report(faults)


def test_only_units_converts() -> None:
    """Powers of 1024 and of ten stand in units.py, not in formulas."""
    powers = {1024.0, 1024.0**2, 1024.0**3, 1e9, 1e12, 1e-6}
    faults = []
    for module in modules():
        if module.layer in ("units", "report"):
            continue  # reports also count parameters in billions
        for node in ast.walk(module.tree):
            if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div)):
                continue
            sides = [side.value for side in (node.left, node.right) if isinstance(side, ast.Constant)]
            if any(isinstance(side, int | float) and float(side) in powers for side in sides):
                faults.append(f"{module.path}:{node.lineno} {ast.unparse(node)}")
    assert not faults, report(faults)
