"""Public functions say what they take, give, assume and rest on."""

import re

from tests.architecture.source import Callable, callables, modules, modules_of, report

# A function of few parameters may say all in its first sentence; a kernel may not.
FEW = 3


def _has(section: str, docstring: str) -> bool:
    """Whether a numpydoc section stands in a docstring."""
    return re.search(rf"^{section}\n-{{{len(section)},}}$", docstring, re.MULTILINE) is not None


def _listed(function: Callable) -> set[str]:
    """Names under `Parameters`."""
    section = re.search(r"^Parameters\n-+\n(.*?)(?=^\S+\n-+$|\Z)", function.docstring, re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^(\S.*?)(?: : .*)?$", section[1], re.MULTILINE) if section else []
    return {name.strip(" *`") for line in lines for name in line.split(",")}


def _needs_sections(function: Callable) -> bool:
    """Whether a function must list parameters and what it gives."""
    kernel = function.module.layer == "cost" and function.owner is None
    least = 1 if kernel else FEW + 1
    return function.public and not function.node.name.startswith("__") and len(function.parameters) >= least


def test_everything_public_has_a_docstring() -> None:
    """Modules, classes and functions."""
    faults = [
        function.where
        for module in modules()
        for function in callables(module)
        if function.public and not function.docstring
    ]
    assert not faults, report(faults)


def test_functions_list_what_they_take_and_give() -> None:
    """Functions of cost/, and others of more than three parameters, have the sections of numpydoc."""
    faults = []
    for module in modules_of("cost", "plan", "search", "spec", "result"):
        for function in filter(_needs_sections, callables(module)):
            returns = function.node.returns
            gives = returns is None or getattr(returns, "value", "") is not None
            wanted = ["Parameters", *(["Returns"] if gives else [])]
            faults += [f"{function.where} lacks {name}" for name in wanted if not _has(name, function.docstring)]
    assert not faults, report(faults)


def test_listed_parameters_are_the_real_ones() -> None:
    """What a docstring lists is what the function takes, no more and no less."""
    faults = []
    for module in modules_of("cost", "plan", "search", "spec", "result"):
        for function in callables(module):
            if not _has("Parameters", function.docstring):
                continue
            real = {parameter.arg for parameter in function.parameters}
            for extra in (function.node.args.vararg, function.node.args.kwarg):
                real |= {extra.arg} if extra else set()
            if real != _listed(function):
                faults.append(f"{function.where}: {sorted(real ^ _listed(function))}")
    assert not faults, report(faults)


def test_assumptions_are_numbered_in_order() -> None:
    """Notes begin with A1 and leave no number out."""
    faults = []
    for module in modules_of("cost"):
        for function in callables(module):
            numbers = [int(number) for number in re.findall(r"^\s*A(\d+)\.", function.docstring, re.MULTILINE)]
            if numbers != list(range(1, len(numbers) + 1)):
                faults.append(f"{function.where}: {numbers}")
    assert not faults, report(faults)


def test_kernels_name_their_source() -> None:
    """A kernel, whose name ends in its unit, says where its formula is from."""
    faults = [
        function.where
        for module in modules_of("cost")
        for function in callables(module)
        if function.public
        and function.owner is None
        and re.search(r"_(s|bytes|flops\w*)$", function.node.name)
        and "Source:" not in function.docstring
    ]
    assert not faults, report(faults)
