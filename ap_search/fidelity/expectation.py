"""What to expect of an answer: errors of recorded runs like it, and where its figures are from."""

from functools import lru_cache

from ap_search.fidelity.bands import KINDS
from ap_search.result.fidelity import Expectation
from ap_search.spec.band import Band
from ap_search.spec.bands import BandEntry, load_bands
from ap_search.spec.calibrated import SUFFIX
from ap_search.spec.cluster import load_cluster
from ap_search.spec.machine import Machine
from ap_search.spec.presets import preset_names
from ap_search.spec.software import Software

# Recorded runs that percentiles need.
FEWEST_RUNS = 5
# Fits that dense models do not use; origins of fits, the least certain first.
_MOE_FITS = ("grouped_gemm", "grouped_gemm_fp8", "dispatch")
_WEAKEST_FIRST = ("default", "derived", "calibrated")
# What makes a machine the one that runs were recorded on; its network and size are the job's.
_DEVICE = ("device", "peak_bf16_flops_per_s", "hbm_bytes_per_s", "gemm", "grouped_gemm", "attention", "sustained_ratio")


def expectation(machine: Machine, software: Software, *, moe: bool) -> Expectation:
    """Say how far recorded runs of a kind on a machine were from predictions (ratios), and where figures come from.

    Parameters
    ----------
    machine : Machine
        The cluster.
    software : Software
        The profile.
    moe : bool
        Whether the model has experts.

    Returns
    -------
    Expectation

    Notes
    -----
    A1. Recorded runs were priced with the profile of their own trainer; their band is taken for any profile that ships.
    A2. Calibrated files carry the errors of runs that their calibration left out; the band of the shipped constants
    does not hold for them, but that of memory, which no constant moves, does.
    A3. A cluster file that takes a preset's name but states another device has no recorded runs.
    """
    kind, file = KINDS[moe], load_bands()
    hardware = machine.name.removesuffix(SUFFIX)
    recorded = SUFFIX in machine.name or _is_preset(machine)
    entry = next((each for each in file.bands if recorded and (each.hardware, each.kind) == (hardware, kind)), None)
    own = software.left_out_errors or machine.left_out_errors
    if own or SUFFIX in f"{machine.name} {software.name}":
        time, where = dict(own).get(kind), f"{kind} runs that the calibration left out"
    else:
        time, where = _shipped(entry, "step_time"), f"recorded {kind} runs on {hardware}"
    memory = _shipped(entry, "memory")
    fits = {origin for name, origin in machine.provenance if moe or name not in _MOE_FITS}
    seconds = next((word for word in _WEAKEST_FIRST if word in fits), _WEAKEST_FIRST[-1])
    said = f"time: {_statement(time, where)}; memory: {_statement(memory, f'recorded {kind} runs on {hardware}')}"
    return Expectation(
        hardware=machine.name,
        kind=kind,
        step_time=_enough(time),
        memory=_enough(memory),
        date=file.date,
        provenance=(("step_time", seconds), ("memory", "analytic"), ("traffic", "analytic"), ("flops", "analytic")),
        statement=said,
    )


def _is_preset(machine: Machine) -> bool:
    """Whether a machine's device is that of the preset whose name it has."""
    if machine.name not in preset_names("clusters"):
        return False
    known = _preset(machine.name)
    return all(getattr(machine, name) == getattr(known, name) for name in _DEVICE)


@lru_cache(maxsize=32)
def _preset(name: str) -> Machine:
    """The preset of a name."""
    return load_cluster(name)


def _shipped(entry: BandEntry | None, what: str) -> Band | None:
    """A band of the runs that ship; None where there is none."""
    section = None if entry is None else getattr(entry, what)
    return None if section is None else section.as_band()


def _enough(band: Band | None) -> Band | None:
    """A band, where its runs are enough for percentiles."""
    return band if band is not None and band.rows >= FEWEST_RUNS else None


def _statement(band: Band | None, where: str) -> str:
    """Say what recorded runs say."""
    if band is None:
        return f"not validated, no {where}"
    if band.rows < FEWEST_RUNS:
        return f"not validated, only {band.rows} {where}"
    ends = f"{band.p10_ratio:.2f} to {band.p90_ratio:.2f}"
    return f"on {band.rows} {where} measured was {ends} of predicted (10th to 90th percentile)"
