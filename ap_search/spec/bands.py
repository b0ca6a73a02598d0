"""Reading the errors of recorded runs by machine and kind of model, which answers show as an expected band."""

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ap_search.spec.band import Band
from ap_search.spec.presets import locate
from ap_search.spec.reader import read_mapping, validate

Ratio = Annotated[float, Field(gt=0, strict=True)]


class _Edge(BaseModel):
    """What all sections share: frozen, no unknown keys, finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class BandSection(BaseModel):
    """Measured over predicted on some recorded runs."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rows: Annotated[int, Field(ge=1, strict=True)] = Field(description="Recorded runs.")
    median_ratio: Ratio = Field(description="Median of measured over predicted.")
    p10_ratio: Ratio = Field(description="Its 10th percentile.")
    p90_ratio: Ratio = Field(description="Its 90th percentile.")

    @model_validator(mode="after")
    def _check(self) -> "BandSection":
        if not self.p10_ratio <= self.median_ratio <= self.p90_ratio:
            raise ValueError("percentiles must ascend")
        return self

    def as_band(self) -> Band:
        """The same as a plain value."""
        return Band(**self.model_dump())


LeftOut = Annotated[
    dict[Literal["dense", "moe"], BandSection],
    Field(
        description="Kind of model -> seconds of a step, measured over predicted, on runs that ap-search calibrate "
        "left out when it wrote this file."
    ),
]


def left_out_bands(given: dict[Literal["dense", "moe"], BandSection]) -> tuple[tuple[str, Band], ...]:
    """Take the bands that a calibrated file carries as plain values."""
    return tuple((kind, section.as_band()) for kind, section in given.items())


class BandEntry(_Edge):
    """One machine and kind of model."""

    hardware: str = Field(description="A cluster's name.")
    kind: Literal["dense", "moe"] = Field(description="Kind of model.")
    step_time: BandSection | None = Field(default=None, description="Seconds of a step.")
    memory: BandSection | None = Field(default=None, description="Peak memory, like with like.")


class BandsFile(_Edge):
    """All machines that recorded runs were priced on."""

    date: str = Field(description="When the runs were priced.")
    source: str = Field(description="Which runs, and by which command.")
    bands: tuple[BandEntry, ...] = Field(description="One entry per machine and kind of model.")


@lru_cache(maxsize=4)
def load_bands(source: str | Path = "bands") -> BandsFile:
    """Read the bands that ship, or a file of them.

    Parameters
    ----------
    source : str or Path
        A name under `configs/fidelity`, or a path.

    Returns
    -------
    BandsFile
        Ratios of measured over predicted.

    Raises
    ------
    SpecError
        When the file is absent or has faults.
    """
    path = locate("fidelity", source)
    return validate(BandsFile, read_mapping(path), path.name)
