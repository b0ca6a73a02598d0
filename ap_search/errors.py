"""Errors that a user can act on: a path into the input, a reason, the legal values."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of an input: where, why, and what would be legal.

    Attributes
    ----------
    path : str
        Path into the user's input, such as `model.yaml: attention.num_heads` or `--set ep`.
    reason : str
        One line, without the path.
    legal : str
        Legal values or the nearest ones, or empty when there is nothing to name.
    """

    path: str
    reason: str
    legal: str = ""

    def __str__(self) -> str:
        """One line: path, reason, legal values."""
        tail = f" (legal: {self.legal})" if self.legal else ""
        return " ".join(f"{self.path}: {self.reason}{tail}".split())


class SpecError(Exception):
    """Bad input: all faults found, one line each; the command line exits with 2."""

    def __init__(self, path: str, reason: str, legal: str = "") -> None:
        self.faults: tuple[Fault, ...] = (Fault(path=path, reason=reason, legal=legal),)
        super().__init__(str(self.faults[0]))

    @classmethod
    def of(cls, faults: Iterable[Fault]) -> "SpecError":
        """Build one error from several faults, in the order given (at least one)."""
        every = tuple(faults)
        error = cls(every[0].path, every[0].reason, every[0].legal)
        error.faults = every
        error.args = ("\n".join(str(fault) for fault in every),)
        return error


class RunFailed(Exception):
    """A run of several processes did not end well: what happened, and the traceback of the rank that failed first."""

    def __init__(self, what: str, trace: str = "") -> None:
        super().__init__(what)
        self.trace = trace
