"""How far the figures of an answer can be trusted: where each comes from, and the errors of recorded runs like it."""

from dataclasses import dataclass

from ap_search.spec.band import Band


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What to expect of predictions for one machine and kind of model (`dense` or `moe`).

    `step_time` and `memory` are bands of recorded runs on that machine, None where there are none; `date` is when they
    were made. `provenance` names each kind of figure with its origin, weakest first where several meet.
    """

    hardware: str
    kind: str
    step_time: Band | None
    memory: Band | None
    date: str
    provenance: tuple[tuple[str, str], ...]
    statement: str

    def step_time_band_s(self, step_time_s: float) -> tuple[float, float] | None:
        """Seconds between which eight of ten steps with this prediction are expected; None without recorded runs."""
        if self.step_time is None:
            return None
        return step_time_s * self.step_time.p10_ratio, step_time_s * self.step_time.p90_ratio
