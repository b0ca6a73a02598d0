"""Cluster files and software profiles as plain content that can be changed, used and written again."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from ap_search.spec import cluster_defaults as rules
from ap_search.spec.cluster import machine_of
from ap_search.spec.cluster_file import ClusterFile
from ap_search.spec.constants import CONSTANTS, Constant, Content, Home
from ap_search.spec.hardware import with_domain, with_network, with_scale_up
from ap_search.spec.machine import Machine
from ap_search.spec.presets import locate
from ap_search.spec.profiles import ProfileFile, software_of
from ap_search.spec.reader import read_mapping, validate
from ap_search.spec.software import Software

SUFFIX = "-calibrated"
_BY_RULE = {
    "gemm": rules.gemm,
    "gemm_fp8": rules.gemm_fp8,
    "grouped_gemm": rules.grouped_gemm,
    "grouped_gemm_fp8": rules.grouped_gemm_fp8,
    "attention": rules.attention,
    "dispatch": rules.dispatch,
}


def cluster_content(source: str | Path) -> dict[str, Any]:
    """Read a cluster file and state in it what calibration may move and the file leaves to rules.

    Parameters
    ----------
    source : str or Path
        A preset's name, or the path of a YAML or JSON file.

    Returns
    -------
    dict
        A complete, legal cluster file in its own units; its machine is that of the source in every figure.

    Raises
    ------
    SpecError
        As `load_cluster`.
    """
    path = locate("clusters", source)
    file = validate(ClusterFile, read_mapping(path), path.name)
    content: dict[str, Any] = file.model_dump(mode="json", exclude_unset=True)
    sources, assumed = dict(file.sources), list(file.assumed)
    for name, rule in _BY_RULE.items():
        section = rule(file)
        content[name] = section.model_dump(mode="json", exclude_unset=True)
        content[name] |= {key: getattr(section, key) for key in _inner_keys(name)}
        if getattr(file, name) is None:
            content[name] |= {"provenance": "derived"}
            sources[name] = f"default: {rules.REASONS[name]}"
    given = len(file.collectives)
    entries = [entry.model_dump(mode="json", exclude_unset=True) for entry in rules.collectives(file)]
    content["collectives"] = entries[:given] + [entry | {"provenance": "derived"} for entry in entries[given:]]
    if given < len(entries):
        stated = [sources["collectives"]] if "collectives" in sources else []
        sources["collectives"] = "; ".join([*stated, f"derived ones by default: {rules.REASONS['collectives']}"])
    for key in _plain_keys(Home.CLUSTER):
        if key not in content:
            content[key] = getattr(file, key)
            sources[key] = f"default: {rules.REASONS[key]}"
            assumed.append(key)
    return content | {"sources": sources, "assumed": assumed}


def software_content(source: str | Path) -> dict[str, Any]:
    """Read a software profile and state in it what calibration may move; arguments and result as `cluster_content`."""
    path = locate("software", source)
    file = validate(ProfileFile, read_mapping(path), path.name)
    content: dict[str, Any] = file.model_dump(mode="json", exclude_unset=True)
    sources = dict(file.sources)
    for key in _plain_keys(Home.SOFTWARE):
        if key not in content:
            content[key] = getattr(file, key)
            sources[key] = "as in profile default"
    return content | {"sources": sources}


def _plain_keys(home: Home) -> list[str]:
    """Keys of calibrated constants that stand by themselves, in no section."""
    return [key for constant in CONSTANTS if constant.home is home for key in constant.keys if "." not in key]


def _inner_keys(section: str) -> list[str]:
    """Keys of calibrated constants that stand in one section of a cluster file."""
    paths = [key.split(".") for constant in CONSTANTS for key in constant.keys]
    return [path[1] for path in paths if path[0] == section and len(path) > 1]


def machine_from(content: Content, where: str) -> Machine:
    """Make a machine of a cluster file's content, SI units; `where` names it in errors and origins."""
    return machine_of(validate(ClusterFile, content, where), where)


def software_from(content: Content, where: str) -> Software:
    """Make a profile of a software file's content, seconds and bytes; `where` names it in errors and origins."""
    return software_of(validate(ProfileFile, content, where), where)


def as_recorded(machine: Machine, recorded: Machine, stated: Machine) -> Machine:
    """Give a machine what one run says of its own hardware.

    Parameters
    ----------
    machine : Machine
        With constants to price with.
    recorded : Machine
        The run's.
    stated : Machine
        What the run's would be if it said nothing beyond the cluster's name.

    Returns
    -------
    Machine
        Memory, domain, network and links of the run where those are not the named cluster's.
    """
    if recorded.device_memory_bytes != stated.device_memory_bytes:
        machine = replace(machine, device_memory_bytes=recorded.device_memory_bytes)
    if recorded.devices_per_domain != stated.devices_per_domain:
        machine = with_domain(machine, recorded.devices_per_domain)
    if recorded.network.bytes_per_s != stated.network.bytes_per_s:
        machine = with_network(machine, recorded.network.bytes_per_s)
    if recorded.scale_up.bytes_per_s != stated.scale_up.bytes_per_s:
        machine = with_scale_up(machine, recorded.scale_up.bytes_per_s)
    return machine


def signed(content: Content, constants: Sequence[Constant], origin: str) -> dict[str, Any]:
    """Write into a file's `sources` where calibrated constants are from.

    Parameters
    ----------
    content : mapping
        The file, its values changed already.
    constants : sequence of Constant
        Those of this file that were changed.
    origin : str
        What they were calibrated on.

    Returns
    -------
    dict
        A copy: their keys have the origin before the one they had, are no assumptions, and are called calibrated.
    """
    heads = {key.partition(".")[0]: constant.name for constant in constants for key in constant.keys}
    sources: dict[str, str] = dict(content.get("sources", {}))
    changed = dict(content)
    for head in heads:
        names = ", ".join(sorted({c.name for c in constants for key in c.keys if key.partition(".")[0] == head}))
        before = f"; before: {sources[head]}" if head in sources else ""
        sources[head] = f"{names} {origin}{before}"
        changed[head] = _calibrated(changed[head])
    changed["sources"] = sources
    if "assumed" in content:
        changed["assumed"] = [key for key in content["assumed"] if key not in heads]
    return changed


def _calibrated(value: Any) -> Any:
    """Call a section calibrated; a plain value has no such word."""
    if isinstance(value, list):
        return [_calibrated(entry) for entry in value]
    return {**value, "provenance": "calibrated"} if isinstance(value, Mapping) else value


def yaml_text(content: Content, head: str) -> str:
    """Write a file as YAML under a line of comment, the same bytes for the same content."""
    text: str = yaml.safe_dump(dict(content), sort_keys=False, width=120, allow_unicode=True)
    return f"# {' '.join(head.split())}\n{text}"
