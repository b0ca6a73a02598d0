"""Frozen records of what `--explain` adds: a plan's communication groups, and a MoE layer's data path step by step."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationGroup:
    """All groups of one kind (`tp cp dp dp-cp pp ep etp edp tp-ep`), and how the worst of them lies.

    Attributes
    ----------
    name : str
        The kind.
    groups, size : int
        How many there are, and members of each.
    first_ranks : tuple of int
        Ranks of the first group, in order.
    domains : int
        Scale-up domains that the worst group spans.
    leaving : int
        Members of the worst group that do not lie in the domain of its first.
    level : str
        Slowest level that the worst group talks over: `inside` the domain, else the name of the level beyond it.
    """

    name: str
    groups: int
    size: int
    first_ranks: tuple[int, ...]
    domains: int
    leaving: int
    level: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PathStep:
    """One step of a MoE layer's data path: seconds and bytes sent by one device, per layer and micro-batch.

    Seconds are those of the step alone: what of them hides behind another micro-batch is not taken off.
    """

    name: str
    forward_s: float
    backward_s: float
    sent_forward_bytes: int
    sent_backward_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Groups of a plan, and the path of the slowest MoE layer of stage `moe_stage`; both empty where there are none."""

    plan: str
    groups: tuple[CommunicationGroup, ...]
    moe_stage: int | None = None
    moe_path: tuple[PathStep, ...] = ()
