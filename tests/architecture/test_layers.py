"""Imports go down only, and each job is done in one place: files, the solver, printing, clocks."""

import ast
import tomllib
from collections.abc import Iterator

import pytest
from importlinter.cli import lint_imports

from tests.architecture.source import ROOT, Module, modules, modules_of, report

CONTRACT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
# The package's front door and its version belong to no layer: they hold names only.
OUTSIDE_LAYERS = {"__init__", "__main__", "version"}

# Only these layers may import a package; the reason stands behind each.
IMPORTERS = {
    "yaml": {"spec"},  # the edge
    "pydantic": {"spec"},  # the edge
    "pydantic_core": {"spec"},  # the edge
    "csv": {"spec"},  # the edge
    "json": {"spec", "result", "report"},  # read at the edge, written by the answer
    "ortools": {"search"},  # the solver
    "rich": {"report"},  # the terminal
    "argparse": {"cli"},  # flags
    "torch": {"runtime"},  # executing plans is an extra of its own
}
IMPURE = {"time", "datetime", "random", "secrets", "logging", "warnings", "os", "sys", "io", "pathlib", "threading"}


def _found(layers: set[str], package: str) -> list[str]:
    """Imports of a package outside some layers."""
    return [
        f"{module.path}:{line} imports {package}"
        for module in modules()
        if module.layer not in layers
        for name, line in module.imports
        if name == package
    ]


def _calls(module: Module) -> Iterator[tuple[str, int]]:
    """What a module calls, as written, and on which line."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node.lineno


def test_contracts_of_the_import_linter_hold(capsys: pytest.CaptureFixture[str]) -> None:
    """The contracts of pyproject.toml: layers, and who may use the solver."""
    code = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True)
    assert code == 0, capsys.readouterr().out


def test_every_part_of_the_package_is_in_a_layer() -> None:
    """A new folder or module that no contract names would escape it."""
    layers = next(contract["layers"] for contract in CONTRACT["contracts"] if contract["type"] == "layers")
    named = {name.strip().removeprefix("ap_search.") for layer in layers for name in layer.split("|")}
    assert {module.layer for module in modules()} - OUTSIDE_LAYERS == named


@pytest.mark.parametrize("package", IMPORTERS)
def test_packages_are_imported_where_they_belong(package: str) -> None:
    """YAML and JSON are read in spec/ only, the solver lives in search/, the terminal in report/, torch in runtime/."""
    faults = _found(IMPORTERS[package], package)
    assert not faults, report(faults)


def test_files_are_opened_at_the_edges_only() -> None:
    """Files are read in spec/ and written in report/."""
    faults = [
        f"{module.path}:{line} calls {call}"
        for module in modules()
        if module.layer not in ("spec", "report")
        for call, line in _calls(module)
        if call.split(".")[-1] in ("open", "fdopen", "read_text", "read_bytes", "write_text", "write_bytes")
        and call != "os.open"  # the null device of a closed stdout
    ]
    assert not faults, report(faults)


def test_only_the_command_line_and_reports_print() -> None:
    """`print` stands in cli.py and report/."""
    faults = [
        f"{module.path}:{line} prints"
        for module in modules()
        if module.layer not in ("cli", "report")
        for call, line in _calls(module)
        if call == "print"
    ]
    assert not faults, report(faults)


def test_nothing_in_a_file_is_run_as_code() -> None:
    """No eval, exec, pickle or unsafe YAML loader anywhere."""
    banned = {"eval", "exec", "compile", "__import__", "yaml.load", "yaml.unsafe_load", "pickle.load", "pickle.loads"}
    faults = [
        f"{module.path}:{line} calls {call}"
        for module in modules()
        for call, line in _calls(module)
        if call in banned and not (call == "yaml.load" and _loads_safely(module, line))
    ]
    assert not faults, report(faults)


def _loads_safely(module: Module, line: int) -> bool:
    """Whether a `yaml.load` names a loader of ours that derives from the safe one."""
    safe = {
        node.name
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("SafeLoader") for base in node.bases)
    }
    call = module.text.splitlines()[line - 1]
    return any(name in call for name in safe)


def test_cost_kernels_are_pure() -> None:
    """cost/ has no clock, randomness, logging, environment or files, and no state that changes."""
    faults = [
        f"{module.path}:{line} imports {name}"
        for module in modules_of("cost")
        for name, line in module.imports
        if name in IMPURE
    ]
    for module in modules_of("cost"):
        faults += [
            f"{module.path}:{node.lineno} has a {type(node).__name__.lower()} statement"
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Global | ast.Nonlocal)
        ]
        faults += [f"{module.path}:{line} calls {call}" for call, line in _calls(module) if ".random." in f".{call}."]
    assert not faults, report(faults)
