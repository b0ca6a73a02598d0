"""The package's own source as syntax trees: what the architecture tests look at."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ap_search"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One module: its path from the root, its layer (first folder or the file's own name), its tree and text."""

    path: str
    layer: str
    tree: ast.Module
    text: str

    @property
    def imports(self) -> tuple[tuple[str, int], ...]:
        """Top-level names of imported packages with their lines, imports inside functions included."""
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [(alias.name.split(".")[0], node.lineno) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.append((node.module.split(".")[0], node.lineno))
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Callable:
    """One function or method with the class it stands in (None for a function of the module)."""

    module: Module
    node: Function
    owner: ast.ClassDef | None

    @property
    def where(self) -> str:
        """Path, line and name for a message."""
        owner = f"{self.owner.name}." if self.owner else ""
        return f"{self.module.path}:{self.node.lineno} {owner}{self.node.name}"

    @property
    def public(self) -> bool:
        """Whether neither its name nor its class's begins with an underscore."""
        return not self.node.name.startswith("_") and not (self.owner and self.owner.name.startswith("_"))

    @property
    def parameters(self) -> tuple[ast.arg, ...]:
        """Parameters without `self` or `cls`."""
        arguments = self.node.args
        every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        bound = self.owner is not None and "staticmethod" not in decorators(self.node)
        return every[1:] if bound else every

    @property
    def docstring(self) -> str:
        """Docstring, empty where there is none."""
        return ast.get_docstring(self.node) or ""


@lru_cache(maxsize=1)
def modules() -> tuple[Module, ...]:
    """Every module of the package, by path."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        inside = file.relative_to(PACKAGE)
        layer = inside.parts[0] if len(inside.parts) > 1 else inside.stem
        path = file.relative_to(ROOT).as_posix()
        found.append(Module(path=path, layer=layer, tree=ast.parse(text), text=text))
    return tuple(found)


def modules_of(*layers: str) -> tuple[Module, ...]:
    """Modules of some layers."""
    return tuple(module for module in modules() if module.layer in layers)


def callables(module: Module) -> Iterator[Callable]:
    """Functions and methods of a module; functions inside functions are left to the one that holds them."""
    for node in module.tree.body:
        if isinstance(node, Function):
            yield Callable(module=module, node=node, owner=None)
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, Function):
                    yield Callable(module=module, node=inner, owner=node)


def classes(module: Module) -> Iterator[ast.ClassDef]:
    """Classes of a module."""
    return (node for node in module.tree.body if isinstance(node, ast.ClassDef))


def decorators(node: Function | ast.ClassDef) -> tuple[str, ...]:
    """Names of decorators, without their arguments."""
    bare = (item.func if isinstance(item, ast.Call) else item for item in node.decorator_list)
    return tuple(ast.unparse(item) for item in bare)


def fields_of(node: ast.ClassDef) -> Iterator[tuple[str, str, int]]:
    """Name, annotation and line of each annotated field of a class."""
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            yield item.target.id, ast.unparse(item.annotation), item.lineno


def report(faults: list[str]) -> str:
    """Faults one a line, below a blank one, for an assertion's message."""
    return "\n" + "\n".join(faults)
