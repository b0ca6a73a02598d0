"""The two lines of a Megatron-LM log that matter: seconds of an iteration, and memory of each rank."""

import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ap_search.errors import SpecError
from ap_search.spec.reader import read_text
from ap_search.spec.run import MemoryKind, MemoryReading, MemoryStage
from ap_search.units import MIB, mib_to_bytes, ms_to_s

MAX_LOG_BYTES = 256 * MIB
_ITERATION = re.compile(r"\biteration\s+[0-9]+/\s*[0-9]+\s*\|")
_NUMBER = r"[0-9]+(?:\.[0-9]*)?(?![0-9.])"
_ELAPSED = re.compile(rf"elapsed time per iteration \(ms\):\s*({_NUMBER})")
_BATCH = re.compile(r"global batch size:\s*([0-9]+)")
_MEMORY = re.compile(
    r"\[Rank (?P<rank>[0-9]+)\] \(after [0-9]+ iterations\) memory \(MB\).*?"
    rf"max allocated: (?P<allocated>{_NUMBER}).*?max reserved: (?P<reserved>{_NUMBER})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronLog:
    """What a log says of one run.

    `step_time_s` is the median over intervals without the first, None where no interval is left; `allocated_bytes` and
    `reserved_bytes` have one pair (rank, bytes) per rank that the log names.
    """

    step_time_s: float | None
    intervals: int
    global_batch: int | None
    allocated_bytes: tuple[tuple[int, int], ...]
    reserved_bytes: tuple[tuple[int, int], ...]


def read_megatron_log(path: Path) -> MegatronLog:
    """Read a log of Megatron-LM's training loop.

    Parameters
    ----------
    path : Path
        The log of the last rank, or of all ranks together; prefixes of launchers do no harm.

    Returns
    -------
    MegatronLog

    Notes
    -----
    A1. The first interval holds the warm-up and is left out; the median of the others stands against outliers.
    A2. Megatron-LM prints MB for MiB.
    A3. A line whose figure is cut, or 0, is left out.

    Raises
    ------
    SpecError
        When the file cannot be read or holds neither line.

    Source: Megatron-LM `megatron/training/training.py` (training_log), `utils.py` (report_memory).
    """
    lines = read_text(path, limit_bytes=MAX_LOG_BYTES).splitlines()
    steps = [line for line in lines if _ITERATION.search(line) and _ELAPSED.search(line)]
    elapsed = [float(found[1]) for line in steps if (found := _ELAPSED.search(line)) and float(found[1]) > 0]
    batches = [int(found[1]) for line in steps if (found := _BATCH.search(line))]
    ranks = [found for line in lines if (found := _MEMORY.search(line))]
    if not elapsed and not ranks:
        reason = "holds no line of an iteration and none of memory"
        legal = "`elapsed time per iteration (ms): ...` or `[Rank 0] (after 10 iterations) memory (MB) | ...`"
        raise SpecError(path.name, reason, legal)
    return MegatronLog(
        step_time_s=ms_to_s(median(elapsed[1:])) if len(elapsed) > 1 else None,
        intervals=max(0, len(elapsed) - 1),
        global_batch=batches[-1] if batches else None,
        allocated_bytes=_by_rank(ranks, "allocated"),
        reserved_bytes=_by_rank(ranks, "reserved"),
    )


def _by_rank(ranks: list[re.Match[str]], what: str) -> tuple[tuple[int, int], ...]:
    """Largest figure of each rank, bytes, in order of rank."""
    largest: dict[int, int] = {}
    for found in ranks:
        rank = int(found["rank"])
        largest[rank] = max(largest.get(rank, 0), mib_to_bytes(float(found[what])))
    return tuple(sorted(largest.items()))


def log_memory(log: MegatronLog, *, devices: int, pp: int) -> tuple[MemoryReading, ...]:
    """Peaks per pipeline stage, bytes, as far as the log names a rank of each.

    Parameters
    ----------
    log : MegatronLog
    devices, pp : int
        Devices and pipeline stages of the run: ranks of one stage follow each other.

    Returns
    -------
    tuple of MemoryReading
        Allocated and reserved; 0 for a stage of which the log names no rank.

    Raises
    ------
    SpecError
        When the log names a rank that the run does not have.
    """
    highest = max((rank for rank, _ in log.allocated_bytes), default=0)
    if highest >= devices:
        raise SpecError("devices", f"is {devices}, but the log names rank {highest}", f"at least {highest + 1}")
    pairs = ((MemoryKind.ALLOCATED, log.allocated_bytes), (MemoryKind.RESERVED, log.reserved_bytes))
    return tuple(_reading(kind, ranks, each=max(1, devices // pp), pp=pp) for kind, ranks in pairs if ranks)


def _reading(kind: MemoryKind, ranks: tuple[tuple[int, int], ...], *, each: int, pp: int) -> MemoryReading:
    """One reading of all ranks that a log names."""
    stages = [0] * pp
    for rank, size in ranks:
        stage = min(rank // each, pp - 1)
        stages[stage] = max(stages[stage], size)
    return MemoryReading(kind=kind, stage=MemoryStage.LIST, peak_bytes=max(stages), stage_bytes=tuple(stages))
