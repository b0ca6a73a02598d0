"""From the words of a record to a cluster: which preset a device is, and what its links and memory are said to be."""

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from ap_search.spec.cluster import machine_of
from ap_search.spec.cluster_file import ClusterFile
from ap_search.spec.machine import Level, Machine
from ap_search.spec.presets import locate, preset_names
from ap_search.spec.reader import read_mapping, validate
from ap_search.spec.run import Unusable, UnusableError
from ap_search.units import gb_to_bytes, gbit_to_bytes_per_s, gbyte_to_bytes_per_s, gib_to_bytes

# A record's memory size may differ this much from a preset's (80 GB, 79.6 GiB, 81,559 MiB are one device).
_SAME_MEMORY_RATIO = 0.1
_OTHER_FORM = re.compile(r"pci-?e", re.IGNORECASE)
_SIZE = re.compile(r"([0-9]+)\s*GB", re.IGNORECASE)
_RATE = re.compile(
    r"(?:(?P<links>[0-9]+)\s*x\s*)?(?:[A-Za-z-]+\s+)?(?P<rate>[0-9]+)\s*(?P<unit>Gb/s|Gbps|Gbit/s|GB/s)", re.IGNORECASE
)
_HDR = re.compile(r"(?P<links>[0-9]+)\s*x\s*(?:HDR|NDR)(?P<rate>[0-9]{3})\b")
_PER_NODE = re.compile(r"per node|node-node", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What a record says of its hardware; absent figures are None."""

    device: str
    memory_gb: float | None = None
    devices_per_domain: int | None = None
    interconnect: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Preset:
    """A cluster preset and the words that records call its device by."""

    machine: Machine
    spellings: tuple[str, ...]


@lru_cache(maxsize=1)
def _presets() -> tuple[_Preset, ...]:
    """Read every cluster preset once."""
    presets = []
    for name in preset_names("clusters"):
        path = locate("clusters", name)
        file = validate(ClusterFile, read_mapping(path), path.name)
        presets.append(_Preset(machine=machine_of(file, path.name), spellings=file.recognised_by))
    return tuple(presets)


@lru_cache(maxsize=1024)
def machine_for(hardware: Hardware) -> tuple[Machine, tuple[str, ...]]:
    """Find the cluster that a record's hardware is, with the links and the memory that the record states.

    Parameters
    ----------
    hardware : Hardware
        As the record says it.

    Returns
    -------
    tuple of Machine and tuple of str
        The machine, and one line per value that was assumed or read out of prose.

    Raises
    ------
    UnusableError
        When no preset is that device.

    Notes
    -----
    A1. A preset is meant where one of its `recognised_by` words stands in the device's name; of several, the one whose
    memory is nearest to the stated size, or the largest where none is stated.
    A2. A rate "per node" or "node-node" is shared by the devices of a node; any other rate is one device's. A rate of
    NVLink counts both directions, unless it is what the preset has in one.

    Source: the words of published records; docs/guides/your-own-runs.md.
    """
    machine, assumed = _recognised(hardware)
    notes = [*assumed]
    if hardware.memory_gb and not _near(hardware.memory_gb, machine):
        machine = replace(machine, device_memory_bytes=gib_to_bytes(hardware.memory_gb))
        notes.append(f"device memory: {hardware.memory_gb:g} GB as stated, not the preset's")
    domain = hardware.devices_per_domain
    if domain and domain not in (machine.devices_per_domain, machine.scale_up.size):
        machine = with_domain(machine, domain)
        notes.append(f"devices per domain: {domain} as stated")
    for part in hardware.interconnect.split(";"):
        machine = _with_rate(machine, part, notes)
    return machine, tuple(notes)


def _recognised(hardware: Hardware) -> tuple[Machine, tuple[str, ...]]:
    """Find the preset; say what was assumed about it."""
    text = hardware.device.lower()
    found = [preset.machine for preset in _presets() if any(_names(text, word) for word in preset.spellings)]
    if _OTHER_FORM.search(text) or not found:
        raise UnusableError(Unusable.SKIPPED, f"hardware: no cluster preset is a {hardware.device}")
    written = _SIZE.search(hardware.device)
    stated = float(written[1]) if written else hardware.memory_gb
    if stated is not None:
        return min(found, key=lambda machine: abs(gb_to_bytes(stated) - machine.device_memory_bytes)), ()
    machine = max(found, key=lambda each: each.device_memory_bytes)
    assumed = (f"cluster: {hardware.device} taken as {machine.name}",) if len(found) > 1 else ()
    return machine, assumed


def _names(text: str, word: str) -> bool:
    """Whether a word stands in a text by itself: h20 is no part of h200."""
    return re.search(rf"(?<![a-z0-9]){re.escape(word.lower())}(?![a-z0-9])", text) is not None


def _near(memory_gb: float, machine: Machine) -> bool:
    """Whether a stated size is the machine's."""
    sizes = (gib_to_bytes(memory_gb), gb_to_bytes(memory_gb))
    return any(abs(size / machine.device_memory_bytes - 1) < _SAME_MEMORY_RATIO for size in sizes)


def _with_rate(machine: Machine, text: str, notes: list[str]) -> Machine:
    """Take the rate that one part of an interconnect's description states, if it states one."""
    found = _HDR.search(text) or _RATE.search(text)
    if found is None or not float(found["rate"]) or found["links"] == "0":
        return machine
    in_bytes = (found.groupdict().get("unit") or "Gb/s") == "GB/s"
    rate = (gbyte_to_bytes_per_s if in_bytes else gbit_to_bytes_per_s)(float(found["rate"]))
    if "nvlink" in text.lower():
        return machine if rate == machine.scale_up.bytes_per_s else with_scale_up(machine, rate / 2)
    each = rate * int(found["links"] or 1)
    if _PER_NODE.search(text) or found["links"]:
        each /= machine.devices_per_domain
    if each != machine.network.bytes_per_s:
        notes.append(f"network: {each * 8e-9:.0f} Gbit/s per device read from {text.strip()!r}")
    return with_network(machine, each)


def with_network(machine: Machine, bytes_per_s: float) -> Machine:
    """Give a machine's devices another network, bytes per second each; what was fitted on the old one scales along."""
    level = machine.network
    factor = bytes_per_s / level.bytes_per_s
    scaled = replace(
        level,
        bytes_per_s=bytes_per_s,
        pair_bytes_per_s=level.pair_bytes_per_s * factor,
        domain_bytes_per_s=level.domain_bytes_per_s * factor,
    )
    dispatch = replace(machine.dispatch, network_bytes_per_s=machine.dispatch.network_bytes_per_s * factor)
    return replace(machine, levels=(*machine.levels[:-1], scaled), dispatch=dispatch)


def with_scale_up(machine: Machine, bytes_per_s: float) -> Machine:
    """Give a machine other links in a scale-up domain, bytes per second and direction; its fits scale along."""
    level = machine.scale_up
    factor = bytes_per_s / level.bytes_per_s
    if factor == 1:
        return machine
    scaled: Level = replace(level, bytes_per_s=bytes_per_s, pair_bytes_per_s=level.pair_bytes_per_s * factor)
    return replace(
        machine,
        levels=(scaled, *machine.levels[1:]),
        dispatch=replace(machine.dispatch, scale_up_bytes_per_s=machine.dispatch.scale_up_bytes_per_s * factor),
        collectives=tuple(replace(fit, bytes_per_s=fit.bytes_per_s * factor) for fit in machine.collectives),
    )


def with_domain(machine: Machine, devices: int) -> Machine:
    """Give a machine scale-up domains of another size, devices."""
    scaled: Level = replace(machine.scale_up, size=devices)
    return replace(machine, devices_per_domain=devices, levels=(scaled, *machine.levels[1:]))
