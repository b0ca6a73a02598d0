"""Functions and modules stay small; parameters and records are written in one way."""

import ast

from tests.architecture.source import ROOT, Callable, callables, classes, decorators, modules, report

MAX_FUNCTION_LINES = 40
MAX_MODULE_LINES = 400
MAX_POSITIONAL = 3

# Path -> reason, for a module or function that may be longer; none needs it.
LONGER: dict[str, str] = {}


def _body_lines(function: Callable) -> int:
    """Lines of a function's body: docstring, blank lines and lines that only comment left out."""
    body = function.node.body
    first = body[1:] if ast.get_docstring(function.node) is not None else body
    if not first or function.node.end_lineno is None:
        return 0
    lines = function.module.text.splitlines()[first[0].lineno - 1 : function.node.end_lineno]
    return sum(1 for line in lines if line.strip() and not line.strip().startswith("#"))


def test_functions_are_short() -> None:
    """At most 40 lines of body."""
    faults = [
        f"{function.where}: {_body_lines(function)} lines"
        for module in modules()
        for function in callables(module)
        if _body_lines(function) > MAX_FUNCTION_LINES and function.where not in LONGER
    ]
    assert not faults, report(faults)


def test_modules_are_short() -> None:
    """At most 400 lines, the package's and the tests' alike."""
    files = [*(ROOT / "ap_search").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    lengths = {file.relative_to(ROOT).as_posix(): len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    faults = [f"{path}: {length} lines" for path, length in sorted(lengths.items()) if length > MAX_MODULE_LINES]
    assert not [fault for fault in faults if fault.split(":")[0] not in LONGER], report(faults)


def test_many_parameters_are_named() -> None:
    """A public function takes at most three parameters by position."""
    faults = []
    for module in modules():
        for function in callables(module):
            arguments = function.node.args
            keyword_only = len(arguments.kwonlyargs)
            positional = len(function.parameters) - keyword_only
            if function.public and positional > MAX_POSITIONAL:
                faults.append(f"{function.where}: {positional} parameters by position")
    assert not faults, report(faults)


def test_records_are_frozen() -> None:
    """Public dataclasses are frozen, slotted and built by keyword."""
    wanted = ("frozen=True", "slots=True", "kw_only=True")
    faults = []
    for module in modules():
        for node in classes(module):
            if node.name.startswith("_") or "dataclass" not in decorators(node):
                continue
            said = " ".join(ast.unparse(item) for item in node.decorator_list)
            faults += [f"{module.path}:{node.lineno} {node.name} lacks {word}" for word in wanted if word not in said]
    assert not faults, report(faults)


def test_no_dict_crosses_a_layer() -> None:
    """Plans, costs and results travel as records; a dict appears only where the answer becomes JSON."""
    faults = []
    for module in modules():
        if module.layer not in ("cost", "plan", "result") or module.path.endswith("result/json.py"):
            continue
        for function in callables(module):
            if not function.public or function.node.name == "to_json":
                continue
            hints = [parameter.annotation for parameter in function.parameters] + [function.node.returns]
            if any("dict" in ast.unparse(hint).lower() or "Mapping" in ast.unparse(hint) for hint in hints if hint):
                faults.append(function.where)
    assert not faults, report(faults)
