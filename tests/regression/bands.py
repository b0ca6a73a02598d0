"""The bands of errors that answers show: the file in configs/fidelity, made of the runs that ship."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from ap_search.fidelity.bands import Bands

FILE = Path(__file__).resolve().parents[2] / "configs" / "fidelity" / "bands.yaml"
SOURCE = "measured over predicted on configs/runs, ap-search validate; python -m tests.regression.update_fidelity"


def written(bands: Bands, date: str) -> str:
    """The text of the file."""
    entries: list[dict[str, Any]] = []
    for hardware, kind, time, memory in bands:
        entry: dict[str, Any] = {"hardware": hardware, "kind": kind}
        entry |= {name: asdict(band) for name, band in (("step_time", time), ("memory", memory)) if band is not None}
        entries.append(entry)
    head = "# Written by python -m tests.regression.update_fidelity only; ratios of measured over predicted.\n"
    return head + yaml.safe_dump({"date": date, "source": SOURCE, "bands": entries}, sort_keys=False, width=120)
