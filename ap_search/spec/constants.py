"""The constants that recorded runs can calibrate: where they stand in a file, which way they work, how far they go."""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Content = Mapping[str, Any]
"""A cluster file or a software profile in plain values, as read from YAML."""

# How far a factor goes: launch times differ by more between stacks than speeds do.
FARTHEST_SPEED, FARTHEST_TIME = 5.0, 10.0


class Effect(StrEnum):
    """How a constant makes a step faster: a speed grows, a time shrinks, the exposed rest of an overlap shrinks."""

    SPEED = "speed"
    TIME = "time"
    OVERLAP = "overlap"


class Home(StrEnum):
    """The file in which a constant stands."""

    CLUSTER = "cluster"
    SOFTWARE = "software"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One constant that runs may identify: keys of a file that move together by one factor.

    Attributes
    ----------
    name : str
        What reports call it.
    home : Home
        The file.
    keys : tuple of str
        Dotted paths into the file; a list on the way stands for all its entries.
    effect : Effect
        What being faster means.
    spread_ratio : float
        How far stacks and machines differ in it, as a standard deviation of its logarithm: the pull towards the
        shipped value.
    level : bool
        Whether it may stand for the level of a whole stack, when runs can tell no more than that.
    links : str
        The key that bounds its values (a rate cannot exceed its link's); empty where 1 does.
    moe_only : bool
        Whether dense models do not use it.
    """

    name: str
    home: Home
    keys: tuple[str, ...]
    effect: Effect = Effect.SPEED
    spread_ratio: float
    level: bool = False
    links: str = ""
    moe_only: bool = False


_KERNELS = ("gemm", "gemm_fp8", "grouped_gemm", "grouped_gemm_fp8", "attention")

# Spreads: what presets and profiles differ by among themselves, rounded; where only one has a value, an assumption.
CONSTANTS: tuple[Constant, ...] = (
    Constant(
        name="compute",
        home=Home.CLUSTER,
        keys=tuple(f"{kernel}.efficiency_ratio" for kernel in _KERNELS),
        spread_ratio=0.3,
        level=True,
    ),
    Constant(name="gemm", home=Home.CLUSTER, keys=("gemm.efficiency_ratio",), spread_ratio=0.15),
    Constant(name="gemm_fp8", home=Home.CLUSTER, keys=("gemm_fp8.efficiency_ratio",), spread_ratio=0.15),
    Constant(
        name="grouped_gemm",
        home=Home.CLUSTER,
        keys=("grouped_gemm.efficiency_ratio", "grouped_gemm_fp8.efficiency_ratio"),
        spread_ratio=0.15,
        moe_only=True,
    ),
    Constant(name="attention", home=Home.CLUSTER, keys=("attention.efficiency_ratio",), spread_ratio=0.25),
    Constant(
        name="gemm_memory",
        home=Home.CLUSTER,
        keys=tuple(f"{kernel}.hbm_efficiency_ratio" for kernel in _KERNELS[:4]),
        spread_ratio=0.1,
    ),
    Constant(
        name="scale_up",
        home=Home.CLUSTER,
        keys=("scale_up_efficiency_ratio", "collectives.gbyte_per_s"),
        spread_ratio=0.2,
        links="scale_up_gbyte_per_s",
    ),
    Constant(
        name="network",
        home=Home.CLUSTER,
        keys=("network_efficiency_ratio", "network_alltoall_efficiency_ratio"),
        spread_ratio=0.3,
    ),
    Constant(
        name="dispatch_scale_up",
        home=Home.CLUSTER,
        keys=("dispatch.scale_up_gbyte_per_s",),
        spread_ratio=0.2,
        links="scale_up_gbyte_per_s",
        moe_only=True,
    ),
    Constant(
        name="dispatch_network",
        home=Home.CLUSTER,
        keys=("dispatch.network_gbyte_per_s",),
        spread_ratio=0.3,
        links="nic_gbit_per_s",
        moe_only=True,
    ),
    Constant(
        name="compute_efficiency",
        home=Home.SOFTWARE,
        keys=("compute_efficiency_ratio", "attention_efficiency_ratio"),
        spread_ratio=0.3,
        level=True,
    ),
    Constant(name="memory_efficiency", home=Home.SOFTWARE, keys=("hbm_efficiency_ratio",), spread_ratio=0.2),
    Constant(
        name="launch_per_layer",
        home=Home.SOFTWARE,
        keys=("launch_per_layer_us",),
        effect=Effect.TIME,
        spread_ratio=1.0,
    ),
    Constant(
        name="launch_per_moe_layer",
        home=Home.SOFTWARE,
        keys=("launch_per_moe_layer_us", "host_sync_us"),
        effect=Effect.TIME,
        spread_ratio=1.0,
        moe_only=True,
    ),
    Constant(
        name="host_per_layer",
        home=Home.SOFTWARE,
        keys=("host_per_layer_us",),
        effect=Effect.TIME,
        spread_ratio=1.0,
        level=True,
    ),
    Constant(
        name="host_per_moe_layer",
        home=Home.SOFTWARE,
        keys=("host_per_moe_layer_us",),
        effect=Effect.TIME,
        spread_ratio=1.0,
        level=True,
        moe_only=True,
    ),
    Constant(
        name="dp_overlap",
        home=Home.SOFTWARE,
        keys=("dp_reduce_overlap_ratio", "dp_gather_overlap_ratio"),
        effect=Effect.OVERLAP,
        spread_ratio=0.5,
    ),
    Constant(
        name="fsdp_overlap",
        home=Home.SOFTWARE,
        keys=("fsdp_overlap_ratio",),
        effect=Effect.OVERLAP,
        spread_ratio=0.5,
    ),
    Constant(
        name="tp_overlap",
        home=Home.SOFTWARE,
        keys=("tp_overlap_ratio",),
        effect=Effect.OVERLAP,
        spread_ratio=0.3,
    ),
    Constant(
        name="ep_overlap",
        home=Home.SOFTWARE,
        keys=("ep_overlap_ratio",),
        effect=Effect.OVERLAP,
        spread_ratio=0.3,
        moe_only=True,
    ),
)


def values_of(content: Content, key: str) -> tuple[float, ...]:
    """Values at a dotted key of a file, in the file's own units; none where a part of the path is absent.

    Parameters
    ----------
    content : mapping
        The file.
    key : str
        Its path; a list on the way stands for all its entries.

    Returns
    -------
    tuple of float
    """
    return tuple(holder[last] for holder, last in _holders(content, key))


def _holders(content: Any, key: str) -> Iterator[tuple[Any, str]]:
    """Mappings that hold the last part of a key, with that part."""
    head, _, rest = key.partition(".")
    if isinstance(content, list | tuple):
        for entry in content:
            yield from _holders(entry, key)
    elif head in content:
        if rest:
            yield from _holders(content[head], rest)
        else:
            yield content, head


def moved(content: Content, constant: Constant, log_gain: float) -> dict[str, Any]:
    """Give a file in which one constant is `exp(log_gain)` times as fast.

    Parameters
    ----------
    content : mapping
        The file; it is not changed.
    constant : Constant
        What moves.
    log_gain : float
        Natural logarithm of the gain: above 0 is faster.

    Returns
    -------
    dict
        A copy; a value stops at its physical bound, numbers have six significant digits.
    """
    changed = copy.deepcopy(dict(content))
    if log_gain:
        for key in constant.keys:
            for holder, last in _holders(changed, key):
                faster = _faster(holder[last], constant.effect, math.exp(log_gain))
                if constant.effect is Effect.SPEED:
                    faster = min(faster, max(holder[last], _bound(content, constant, holder, last)))
                holder[last] = float(f"{faster:.6g}")
    return changed


def _faster(value: float, effect: Effect, gain: float) -> float:
    """One value after a gain; no more can be exposed than all."""
    if effect is Effect.OVERLAP:
        return max(0.0, 1 - (1 - value) / gain)
    return value * gain if effect is Effect.SPEED else value / gain


def room(content: Content, constant: Constant) -> tuple[float, float]:
    """How far a constant may move: the smallest and the largest logarithm of its gain.

    Parameters
    ----------
    content : mapping
        The file.
    constant : Constant
        What would move.

    Returns
    -------
    tuple of float
        (lowest, highest); (0, 0) where the file has no value that a factor could move.

    Notes
    -----
    A1. No share exceeds 1 and no rate its link; an all-reduce may be counted at twice its link (reduced in the switch).
    A2. Nothing exposed can exceed all of a communication. Beyond that, speeds by a factor of five, times of ten.
    """
    ends = [
        _ends(content, constant, holder, last)
        for key in constant.keys
        for holder, last in _holders(content, key)
        if holder[last] or constant.effect is Effect.OVERLAP
    ]
    return (min(low for low, _ in ends), max(high for _, high in ends)) if ends else (0.0, 0.0)


def _ends(content: Content, constant: Constant, holder: Content, last: str) -> tuple[float, float]:
    """How far one value may move."""
    value, far = holder[last], math.log(FARTHEST_SPEED)
    if constant.effect is Effect.TIME:
        return -math.log(FARTHEST_TIME), math.log(FARTHEST_TIME)
    if constant.effect is Effect.OVERLAP:
        return max(-far, math.log(max(1 - value, 1e-9))), far if value < 1 else 0.0
    return -far, min(far, max(0.0, math.log(_bound(content, constant, holder, last) / value)))


def _bound(content: Content, constant: Constant, holder: Content, last: str) -> float:
    """The largest value that physics allows."""
    if not constant.links or last.endswith("_ratio"):
        return 1.0
    link = float(content[constant.links]) / (8 if constant.links.endswith("gbit_per_s") else 1)
    return 2 * link if holder.get("collective") == "all_reduce" else link
