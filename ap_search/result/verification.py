"""What `verify` found: frozen records, and the documented JSON."""

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison of what an executed plan did with what it should have done.

    Attributes
    ----------
    name : str
        Such as `forward`, `grad.experts.w1`, `bytes.dispatch`, `hook_order`.
    ok : bool
        Whether they agree within the tolerance; true also where an exception is named.
    expected, actual : float
        In the unit: of the rank that is furthest off, or where all agree of the one with the largest figure. None for
        what is no finite number.
    tolerance : float
        Largest difference allowed, in the unit.
    unit : str
        `ratio` (largest difference over the largest value of the tensor), `bytes`, or `count`.
    where : str
        Which rank, layer or step the figures are of.
    exception : str
        Why the figures need not agree, empty where they must.
    """

    name: str
    ok: bool
    expected: float
    actual: float | None
    tolerance: float
    unit: str
    where: str = ""
    exception: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """A plan that was executed: how, and every comparison."""

    model: str
    plan: str
    world_size: int
    backend: str
    torch_version: str
    dtype: str
    steps: int
    seq_len: int
    global_batch: int
    losses: tuple[float, ...]
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether every check holds."""
        return all(check.ok for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Build the documented JSON object."""
        return {"schema_version": 1, "ok": self.ok, **asdict(self)}

    def to_json_text(self) -> str:
        """Write the JSON as text that ends with a newline."""
        return json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n"


def read_verification(text: str) -> Verification:
    """Read back what `Verification.to_json_text` wrote.

    Parameters
    ----------
    text : str
        JSON.

    Returns
    -------
    Verification
    """
    found = json.loads(text)
    del found["schema_version"], found["ok"]
    checks = tuple(Check(**check) for check in found.pop("checks"))
    return Verification(**{**found, "losses": tuple(found["losses"]), "checks": checks})
