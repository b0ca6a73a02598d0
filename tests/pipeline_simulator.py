"""Event simulation of pipeline schedules, for tests only: each device runs its operations in a fixed order.

An operation is `(kind, direction, virtual stage, micro-batch)`; kinds are F (forward), B (whole backward), I (input
gradient) and W (weight gradient). A device's order is a list of steps; a step is a tuple of operations that run into
each other (two only under DualPipe). A step starts when the device is free and what it needs has arrived.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Operation = tuple[str, int, int, int]
Order = list[tuple[Operation, ...]]


@dataclass(frozen=True)
class Costs:
    """Seconds per virtual stage; `overlap` scales a forward and a backward that run into each other."""

    forward: Sequence[float]
    backward: Sequence[float]
    weight_grad: Sequence[float]
    overlap: float = 1.0
    hop: float = 0.0

    def step(self, operations: tuple[Operation, ...]) -> float:
        each = {
            "F": self.forward,
            "B": self.backward,
            "I": [b - w for b, w in zip(self.backward, self.weight_grad, strict=True)],
            "W": self.weight_grad,
        }
        alone = sum(each[kind][stage] for kind, _, stage, _ in operations)
        return alone * self.overlap if len(operations) > 1 else alone


def simulate(orders: list[Order], costs: Costs) -> float:
    """Seconds from the first forward to the last operation of any device."""
    last_stage = len(costs.forward) - 1
    device_of = {op: device for device, order in enumerate(orders) for step in order for op in step}
    done: dict[Operation, float] = {}
    free, position = [0.0] * len(orders), [0] * len(orders)
    while any(position[device] < len(order) for device, order in enumerate(orders)):
        moved = False
        for device, order in enumerate(orders):
            while position[device] < len(order):
                step = order[position[device]]
                needed = [need for op in step for need in _needs(op, last_stage, device_of) if need not in step]
                if any(need not in done for need in needed):
                    break
                arrivals = [done[need] + costs.hop * (device_of[need] != device) for need in needed]
                free[device] = max([free[device], *arrivals]) + costs.step(step)
                done.update(dict.fromkeys(step, free[device]))
                position[device] += 1
                moved = True
        assert moved, "the order deadlocks"
    return max(free)


def _needs(op: Operation, last_stage: int, known: dict[Operation, int]) -> list[Operation]:
    kind, direction, stage, batch = op
    if kind == "F":
        return [("F", direction, stage - 1, batch)] if stage else []
    if kind == "W":
        return [("I", direction, stage, batch)]
    if stage == last_stage:
        return [("F", direction, stage, batch)]
    return [need for need in (("B", direction, stage + 1, batch), ("I", direction, stage + 1, batch)) if need in known]


def most_in_flight(order: Order) -> set[tuple[tuple[int, int], ...]]:
    """Moments of one device that no other moment exceeds: per (direction, virtual stage) what forwards hold alive."""
    places = sorted({(direction, stage) for step in order for _, direction, stage, _ in step})
    alive = dict.fromkeys(places, 0)
    moments = set()
    for step in order:
        for kind, direction, stage, _ in step:
            alive[direction, stage] += kind == "F"
        moments.add(tuple(alive.values()))
        for kind, direction, stage, _ in step:
            alive[direction, stage] -= kind in "BW"
    top = {
        one
        for one in moments
        if not any(other != one and all(a <= b for a, b in zip(one, other, strict=True)) for other in moments)
    }
    return {tuple((stage, count) for (_, stage), count in zip(places, one, strict=True)) for one in top}


def one_f_one_b(pp: int, count: int) -> list[Order]:
    """Megatron-LM `forward_backward_pipelining_without_interleaving`."""
    orders = []
    for rank in range(pp):
        warmup = min(count, pp - rank - 1)
        order: Order = [(("F", 0, rank, i),) for i in range(warmup)]
        for i in range(count - warmup):
            order += [(("F", 0, rank, warmup + i),), (("B", 0, rank, i),)]
        orders.append(order + [(("B", 0, rank, i),) for i in range(count - warmup, count)])
    return orders


def gpipe(pp: int, count: int) -> list[Order]:
    """All forwards, then all backwards."""
    return [[((kind, 0, rank, i),) for kind in "FB" for i in range(count)] for rank in range(pp)]


def interleaved(pp: int, vpp: int, count: int, group: int) -> list[Order]:
    """Megatron-LM `forward_backward_pipelining_with_interleaving`, groups of `group` micro-batches per chunk."""
    table = [
        (i, chunk)
        for first in range(0, count, group)
        for chunk in range(vpp)
        for i in range(first, min(first + group, count))
    ]
    orders = []
    for rank in range(pp):
        forward: Order = [(("F", 0, chunk * pp + rank, i),) for i, chunk in table]
        backward: Order = [(("B", 0, (vpp - 1 - chunk) * pp + rank, i),) for i, chunk in table]
        warmup = min(len(table), 2 * (pp - rank - 1) + (vpp - 1) * group)
        order = forward[:warmup]
        for step in range(len(table) - warmup):
            order += [forward[warmup + step], backward[step]]
        orders.append(order + backward[len(table) - warmup :])
    return orders


def zb_h1(pp: int, count: int) -> list[Order]:
    """Zero Bubble's ZB-H1: 1F1B with input gradients first; rank r makes each weight gradient r micro-batches later."""
    orders = []
    for rank in range(pp):
        warmup = min(count, pp - rank - 1)
        order: Order = [(("F", 0, rank, i),) for i in range(warmup)]
        for i in range(count):
            if warmup + i < count:
                order.append((("F", 0, rank, warmup + i),))
            order.append((("I", 0, rank, i),))
            if i >= rank:
                order.append((("W", 0, rank, i - rank),))
        orders.append(order + [(("W", 0, rank, i),) for i in range(max(count - rank, 0), count)])
    return orders


class _DualRank:
    """Steps of one DualPipe rank in the words of its eight phases; phase 0 starts at the rank's own end."""

    def __init__(self, pp: int, rank: int) -> None:
        self.pp, self.rank = pp, rank
        self.second_half = rank >= pp // 2
        self.order: Order = []
        self._forwards, self._backwards = [0, 0], [0, 0]
        self._delayed: list[tuple[int, int, int]] = []

    def _place(self, phase: int) -> tuple[int, int]:
        direction = phase ^ self.second_half
        return direction, self.pp - 1 - self.rank if direction else self.rank

    def forward(self, phase: int) -> Operation:
        direction, stage = self._place(phase)
        self._forwards[direction] += 1
        return ("F", direction, stage, self._forwards[direction] - 1)

    def backward(self, phase: int, *, delay: bool = False) -> Operation:
        direction, stage = self._place(phase)
        self._backwards[direction] += 1
        batch = self._backwards[direction] - 1
        if delay:
            self._delayed.append((direction, stage, batch))
        return ("I" if delay else "B", direction, stage, batch)

    def weight(self) -> Operation:
        return ("W", *self._delayed.pop(0))

    def run(self, *operations: Operation) -> None:
        self.order += [(op,) for op in operations]

    def overlap(self, *operations: Operation) -> None:
        self.order.append(operations)


def dualpipe(pp: int, count: int) -> list[Order]:
    """deepseek-ai/DualPipe `DualPipe.step`, `count` micro-batches of both directions together."""
    return [_dualpipe_rank(pp, count, rank) for rank in range(pp)]


def _dualpipe_rank(pp: int, count: int, rank: int) -> Order:
    half = min(rank, pp - 1 - rank)
    outward = pp // 2 - half - 1
    steps = _DualRank(pp, rank)
    steps.run(*(steps.forward(0) for _ in range(2 * outward)))
    for _ in range(half + 1):
        steps.run(steps.forward(0), steps.forward(1))
    for _ in range(outward):
        steps.run(steps.backward(1, delay=True), steps.weight(), steps.forward(1))
    for i in range(count // 2 - pp + half + 1):
        (steps.run if i == 0 and outward == 0 else steps.overlap)(steps.forward(0), steps.backward(1))
        steps.overlap(steps.forward(1), steps.backward(0))
    for _ in range(outward):
        steps.run(steps.backward(1))
        steps.overlap(steps.forward(1), steps.backward(0))
    for i in range(2 * (half + 1)):
        # The second half of these delays its weight gradients, from the middle one on.
        steps.run(steps.backward((i + 1) % 2, delay=i >= half + 1))
    for _ in range(outward):
        steps.run(steps.weight(), steps.backward(0, delay=True))
    steps.run(*(steps.weight() for _ in range(half + 1)))
    return steps.order
