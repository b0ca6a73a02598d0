"""What `--explain` adds for people: communication groups with folded ranks, and the MoE layer's path step by step."""

from collections.abc import Sequence
from itertools import pairwise

from rich.text import Text

from ap_search.report.layout import decimals_for, number, paragraph, table, texts
from ap_search.result import CommunicationGroup, Explanation, PathStep
from ap_search.units import bytes_to_mib, s_to_ms

LONGEST_LIST = 4
GROUP_HEADERS = (
    ("", "", "members", "domains of", "outside its", "slowest", "ranks of the"),
    ("group", "groups", "each", "the worst", "first domain", "level", "first group"),
)
PATH_HEADERS = (
    ("", "forward", "backward", "sent forward", "sent backward"),
    ("step", "ms", "ms", "MiB", "MiB"),
)


def folded_ranks(ranks: Sequence[int]) -> str:
    """Write ranks shortly: `0-7` for neighbours, `0,8,16,..,248` for even steps, a short list in full."""
    steps = {after - before for before, after in pairwise(ranks)}
    if len(ranks) > 2 and steps == {1}:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > LONGEST_LIST and len(steps) == 1:
        return f"{','.join(map(str, ranks[:3]))},..,{ranks[-1]}"
    return ",".join(_runs(ranks))


def _runs(ranks: Sequence[int]) -> list[str]:
    """Write each run of neighbours as its ends."""
    starts = [at for at, rank in enumerate(ranks) if at == 0 or rank != ranks[at - 1] + 1]
    ends = [*starts[1:], len(ranks)]
    return [
        str(ranks[first]) if end - first == 1 else f"{ranks[first]}-{ranks[end - 1]}"
        for first, end in zip(starts, ends, strict=True)
    ]


def explanation_lines(explanation: Explanation, width: int) -> list[Text]:
    """Write the groups of the plan, then the path of its slowest MoE layer."""
    lines = _group_lines(explanation.groups, width)
    if explanation.moe_path:
        lines += ["", *_path_lines(explanation, width)]
    return texts(["", *lines])


def _group_lines(groups: Sequence[CommunicationGroup], width: int) -> list[str]:
    """Align the groups; one device, or meshes that do not fill the devices, have none."""
    if not groups:
        return paragraph("none: one device, or meshes that do not fill the devices", width=width, label="groups")
    rows = [
        (
            group.name,
            f"{group.groups:,}",
            f"{group.size:,}",
            f"{group.domains:,}",
            f"{group.leaving:,}",
            group.level,
            folded_ranks(group.first_ranks),
        )
        for group in groups
    ]
    return table(headers=GROUP_HEADERS, rows=rows, left=(0, 5, 6))


def _path_lines(explanation: Explanation, width: int) -> list[str]:
    """Align the steps of one MoE layer with milliseconds and MiB, their sum below."""
    steps = explanation.moe_path
    both = (
        sum(step.forward_s for step in steps),
        sum(step.backward_s for step in steps),
        sum(step.sent_forward_bytes for step in steps),
        sum(step.sent_backward_bytes for step in steps),
    )
    decimals = decimals_for(s_to_ms(max(both[:2])), 5)
    rows = [_path_cells(step.name, _figures(step), decimals) for step in steps]
    title = f"slowest MoE layer of stage {explanation.moe_stage}, per layer and micro-batch on the busiest device:"
    return [
        *paragraph(title, width=width, indent=""),
        *table(headers=PATH_HEADERS, rows=[*rows, _path_cells("sum", both, decimals)], left=(0,)),
    ]


def _figures(step: PathStep) -> tuple[float, float, int, int]:
    """List a step's seconds and bytes in the order of the columns."""
    return step.forward_s, step.backward_s, step.sent_forward_bytes, step.sent_backward_bytes


def _path_cells(name: str, figures: tuple[float, float, int, int], decimals: int) -> tuple[str, ...]:
    """Write one step."""
    seconds, sizes = figures[:2], figures[2:]
    shown = [number(s_to_ms(second), decimals) for second in seconds]
    return (name, *shown, *(number(bytes_to_mib(size), 1) if size else "-" for size in sizes))
