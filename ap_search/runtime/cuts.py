"""Parameters that know which slice of the whole tensor they are, and initial values that do not depend on the plan."""

from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import sha256

import torch
from torch import Tensor, nn


class Kind(StrEnum):
    """Which of the memory model's classes a parameter belongs to."""

    DENSE = "dense"
    ROUTER = "router"
    EXPERT = "expert"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Where a rank's parameter lies in the whole one, data-parallel sharding aside.

    `tp_partial` says that each tensor-parallel rank has only a part of the gradient, since each sees other tokens
    (sequence parallelism) or other heads: the parts are summed over tp once per step.
    """

    full_shape: tuple[int, ...]
    slices: tuple[slice, ...]
    kind: Kind
    tp_partial: bool = False


class CutModule(nn.Module):
    """A module whose own parameters record their cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.cuts: dict[str, Cut] = {}

    def add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, kind: Kind = Kind.DENSE) -> None:
        """Register a parameter, whole for now."""
        self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype)))
        self.cuts[name] = Cut(full_shape=shape, slices=tuple(slice(0, size) for size in shape), kind=kind)

    def narrow(self, name: str, *, dim: int, index: int, count: int) -> None:
        """Keep part `index` of `count` equal parts of a parameter along one dim."""
        whole = self.get_parameter(name)
        size = whole.shape[dim] // count
        part = whole.detach().narrow(dim, index * size, size).clone()
        self.register_parameter(name, nn.Parameter(part))
        cut = self.cuts[name]
        start = cut.slices[dim].start + index * size
        slices = (*cut.slices[:dim], slice(start, start + size), *cut.slices[dim + 1 :])
        self.cuts[name] = replace(cut, slices=slices)

    def mark_partial(self, *names: str) -> None:
        """Say that gradients of these parameters are parts to be summed over tp."""
        for name in names:
            self.cuts[name] = replace(self.cuts[name], tp_partial=True)


def named_cuts(root: nn.Module) -> dict[str, Cut]:
    """Collect the cuts of all parameters under a module by qualified name.

    Parameters
    ----------
    root : Module
        A chunk of the model, or all of it.

    Returns
    -------
    dict
        The same names as `root.named_parameters()`.
    """
    found: dict[str, Cut] = {}
    for prefix, module in root.named_modules():
        if isinstance(module, CutModule):
            found.update({f"{prefix}.{name}" if prefix else name: cut for name, cut in module.cuts.items()})
    return found


def draw(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Draw the whole initial value of a parameter from a generator of its own, in float64.

    Parameters
    ----------
    name : str
        Qualified name in the whole model, so that every rank of every plan draws the same.
    shape : tuple of int
        Shape of the whole parameter.
    seed : int
        Of the run.

    Returns
    -------
    Tensor
        Matrices scaled by the root of their fan-in; weights of norms around 1, so that no error of theirs hides.
    """
    digest = sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if len(shape) > 1:
        scaled: Tensor = values / shape[-1] ** 0.5
        return scaled
    return values * 0.1 + (1.0 if name.endswith("weight") else 0.0)


def initialise(root: nn.Module, seed: int) -> None:
    """Fill every parameter and buffer under a module, all of them still whole."""
    with torch.no_grad():
        for name, values in (*root.named_parameters(), *root.named_buffers()):
            values.copy_(draw(name, tuple(values.shape), seed))
