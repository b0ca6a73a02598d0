"""What an uneven load costs a plan, in words: seconds, GiB, and what other placements of experts would change."""

from ap_search.report.layout import decimals_for, number, paragraph
from ap_search.result import ImbalanceCost, OtherPlacement
from ap_search.units import bytes_to_gib


def imbalance_lines(cost: ImbalanceCost, *, step_s: float, width: int) -> list[str]:
    """Write the busiest rank, what it costs beyond a balanced load, and the change under each other placement.

    Parameters
    ----------
    cost : ImbalanceCost
    step_s : float
        Seconds of the plan's step: changes have as many decimals.
    width : int
        Columns.
    """
    decimals = decimals_for(step_s, 4)
    text = (
        f"the busiest rank receives up to {_ratio(cost.worst_rank_ratio_max)} its share, experts placed "
        f"{placement_text(cost.placement, cost.redundant_experts)}: "
        f"{_change(cost.cost_s, cost.cost_bytes, decimals)} against a balanced load"
    )
    lines = paragraph(text, width=width, label="load")
    if cost.others:
        others = "; ".join(_other_text(other, decimals) for other in cost.others)
        lines += paragraph(f"the same plan with experts placed {others}", width=width, label="instead")
    return lines


def placement_text(placement: str, redundant_experts: int) -> str:
    """Write a placement with its redundant experts, where it has any."""
    return f"{placement} with {redundant_experts} redundant" if redundant_experts else placement


def _other_text(other: OtherPlacement, decimals: int) -> str:
    """Write one placement with its busiest rank and what it changes."""
    change = _change(-other.gain_s, -other.gain_bytes, decimals)
    placed = placement_text(other.placement, other.redundant_experts)
    return f"{placed} ({_ratio(other.worst_rank_ratio_max)}): {change}"


def _ratio(ratio: float) -> str:
    """Write a multiple."""
    return f"{number(ratio, 2)}x"


def _change(seconds: float, size_bytes: int, decimals: int) -> str:
    """Write a change of the step and of the peak with their signs."""
    return f"{_signed(seconds, decimals)} s, {_signed(bytes_to_gib(size_bytes), 1)} GiB"


def _signed(value: float, decimals: int) -> str:
    """Write a number with its sign, none where it rounds to 0."""
    text = number(abs(value), decimals)
    if not any(digit in text for digit in "123456789"):
        return text
    return f"{'-' if value < 0 else '+'}{text}"
