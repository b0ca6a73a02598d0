"""Collectives and messages: bytes on the wire and seconds, inside a scale-up domain and across domains."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ap_search.spec.machine import Collective, CollectiveFit, Machine
from ap_search.units import Quantity


def sent_bytes(collective: Collective, *, size_bytes: Quantity, ranks: Quantity) -> Quantity:
    """Bytes that each rank sends to others in one collective, itself left out.

    Parameters
    ----------
    collective : Collective
        Which one.
    size_bytes : Quantity
        The large buffer of one rank, bytes: what all-reduce reduces, what all-gather fills, what the others read.
    ranks : Quantity
        Members of the group, 1 or more.

    Returns
    -------
    Quantity
        `2 (n-1)/n S` for all-reduce, `(n-1)/n S` for the others.

    Notes
    -----
    A1. Ring algorithms; trees send the same in total.

    Source: nccl-tests `doc/PERFORMANCE.md` (bus bandwidth factors).
    """
    rounds = 2.0 if collective is Collective.ALL_REDUCE else 1.0
    return rounds * size_bytes * (ranks - 1.0) / ranks


def collective_time_s(
    machine: Machine,
    collective: Collective,
    *,
    size_bytes: Quantity,
    ranks: Quantity,
    ranks_per_domain: Quantity,
    domains: Quantity,
) -> Quantity:
    """Time of one collective, seconds.

    Parameters
    ----------
    machine : Machine
        Constants per collective and number of ranks, and the network's figures.
    collective : Collective
        Which one.
    size_bytes : Quantity
        The large buffer of one rank, bytes (the convention of nccl-tests), 0 or more.
    ranks : Quantity
        Members of the group, 1 or more.
    ranks_per_domain : Quantity
        Members that share one scale-up domain; where uneven, those of the domain with the fewest.
    domains : Quantity
        Scale-up domains that the group spans, 1 or more.

    Returns
    -------
    Quantity
        0 where the group has one rank or sends nothing. In one domain `a + w/B + c sqrt(w)` with w = `sent_bytes`.
        Across domains a tree (all-reduce over two) or a ring; for all-to-all the slower of the network and the domain.

    Notes
    -----
    A1. Constants are interpolated over the number of ranks; beyond the largest one fitted, latency grows on linearly
        and bandwidth stays.
    A2. Each rank drives its own NIC, and all groups of the job run the same collective at once.
    A3. A ring that leaves the domain runs at the slower of scale-up and of the members' NICs together, and passes each
        rank once: latency as in one domain of that many ranks, plus one network hop per domain edge.
    A4. All-reduce over two domains is a tree: each domain sends its buffer once instead of twice, chunks pipeline, so
        that the third term is `2 sqrt(a w/B)`. Over three or more domains it is a ring.
    A5. All-to-all over the network cannot pool NICs; what stays in the domain moves at the same time.

    Source: fits on aiconfigurator NCCL tables (median error 2.9 %); nccl-tests logs of H100, A100 and GB200 clusters;
    docs/cost-model/collective.md.
    """
    moved = sent_bytes(collective, size_bytes=size_bytes, ranks=np.asarray(ranks, dtype=np.float64))
    line = collective_line(machine, collective, ranks=ranks, ranks_per_domain=ranks_per_domain, domains=domains)
    time = line.time_s(moved)
    if collective is Collective.ALL_TO_ALL:
        across = _alltoall_across_s(machine, size_bytes=size_bytes, ranks=ranks, inside=ranks_per_domain)
        time = np.where(np.greater(domains, 1), across, time)
    return np.where(np.greater(moved, 0), time, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CollectiveLine:
    """A collective over one group as a function of the bytes w that each rank sends: `a + r w + c sqrt(w)`."""

    latency_s: Quantity
    seconds_per_byte: Quantity
    sqrt_s: Quantity

    def time_s(self, moved_bytes: Quantity, *, messages: Quantity = 1.0) -> Quantity:
        """Time in which each rank sends `moved_bytes` in so many equal messages, seconds."""
        curved = self.sqrt_s * np.sqrt(moved_bytes * messages)
        return messages * self.latency_s + moved_bytes * self.seconds_per_byte + curved


def collective_line(
    machine: Machine, collective: Collective, *, ranks: Quantity, ranks_per_domain: Quantity, domains: Quantity
) -> CollectiveLine:
    """Coefficients of one collective over given groups, seconds and seconds per byte, for pricing many sizes.

    Parameters
    ----------
    machine, collective, ranks, ranks_per_domain, domains
        As for `collective_time_s`; an all-to-all must stay in one domain.

    Returns
    -------
    CollectiveLine
        One entry per group.

    Notes
    -----
    A1. to A4. of `collective_time_s`.

    Source: as `collective_time_s`.
    """
    fits = _fits(machine, collective)
    ranks, inside = np.asarray(ranks, dtype=np.float64), np.asarray(ranks_per_domain, dtype=np.float64)
    local = CollectiveLine(
        latency_s=_latency_s(fits, ranks),
        seconds_per_byte=1.0 / _bytes_per_s(fits, ranks),
        sqrt_s=_sqrt_s(fits, ranks),
    )
    across = _ring_across(machine, fits, ranks=ranks, inside=inside, domains=domains)
    if collective is Collective.ALL_REDUCE:
        across = _chosen(np.equal(domains, 2), _tree_across(machine, fits, ranks=ranks, inside=inside), across)
    return _chosen(np.greater(domains, 1), across, local)


def _chosen(condition: Quantity, yes: CollectiveLine, no: CollectiveLine) -> CollectiveLine:
    """Choose between two lines per plan."""
    return CollectiveLine(
        latency_s=np.where(condition, yes.latency_s, no.latency_s),
        seconds_per_byte=np.where(condition, yes.seconds_per_byte, no.seconds_per_byte),
        sqrt_s=np.where(condition, yes.sqrt_s, no.sqrt_s),
    )


def point_to_point_time_s(machine: Machine, *, size_bytes: Quantity, crosses_domain: Quantity) -> Quantity:
    """Time of one message between two devices, seconds.

    Parameters
    ----------
    machine : Machine
        Constants of an all-to-all between two ranks, and the network's figures.
    size_bytes : Quantity
        Bytes of the message, 0 or more.
    crosses_domain : Quantity
        Whether sender and receiver lie in different scale-up domains (0 or 1).

    Returns
    -------
    Quantity
        0 where nothing is sent; `a + w/B + c sqrt(w)` in a domain, `a + hop + w/(NIC efficiency)` across.

    Notes
    -----
    A1. An all-to-all between two ranks is one send and one receive, so its constants are those of a message.
    A2. Both directions run at full rate at once (full duplex).

    Source: aiconfigurator NCCL tables, alltoall over 2 ranks; NDR NICs reach 46-48 of 50 GB/s (nccl-tests issue 267).
    """
    fits = _fits(machine, Collective.ALL_TO_ALL)
    network = machine.network
    start = _latency_s(fits, 2)
    local = start + size_bytes / _bytes_per_s(fits, 2) + _sqrt_s(fits, 2) * np.sqrt(size_bytes)
    across = start + network.latency_s + size_bytes / (network.bytes_per_s * network.efficiency_ratio)
    return np.where(np.greater(size_bytes, 0), np.where(np.asarray(crosses_domain, dtype=bool), across, local), 0.0)


def _fits(machine: Machine, collective: Collective) -> tuple[CollectiveFit, ...]:
    """Constants of one collective, fewest ranks first."""
    fits = (fit for fit in machine.collectives if fit.collective is collective)
    return tuple(sorted(fits, key=lambda fit: fit.ranks))


def _latency_s(fits: Sequence[CollectiveFit], ranks: Quantity) -> Quantity:
    """Latency over `ranks` ranks of one domain, going on at the last slope beyond the fitted numbers."""
    known = [fit.ranks for fit in fits]
    values = [fit.latency_s for fit in fits]
    slope = max(values[-1] - values[-2], 0.0) / (known[-1] - known[-2]) if len(fits) > 1 else 0.0
    return np.interp(ranks, known, values) + slope * np.maximum(np.subtract(ranks, known[-1]), 0.0)


def _bytes_per_s(fits: Sequence[CollectiveFit], ranks: Quantity) -> Quantity:
    """Bandwidth over `ranks` ranks of one domain, unchanged beyond the fitted numbers."""
    return np.interp(ranks, [fit.ranks for fit in fits], [fit.bytes_per_s for fit in fits])


def _sqrt_s(fits: Sequence[CollectiveFit], ranks: Quantity) -> Quantity:
    """Square-root term over `ranks` ranks of one domain, unchanged beyond the fitted numbers."""
    return np.interp(ranks, [fit.ranks for fit in fits], [fit.sqrt_s for fit in fits])


def _members_bytes_per_s(machine: Machine, inside: Quantity) -> Quantity:
    """Rate at which the members in one domain send across the network together in a ring."""
    network = machine.network
    return np.minimum(inside * (network.bytes_per_s * network.efficiency_ratio), network.domain_bytes_per_s)


def _scale_up_bytes_per_s(fits: Sequence[CollectiveFit], inside: Quantity) -> Quantity:
    """Bandwidth among the members in one domain; no bound where there is only one."""
    return np.where(np.greater(inside, 1), _bytes_per_s(fits, inside), np.inf)


def _ring_across(
    machine: Machine, fits: Sequence[CollectiveFit], *, ranks: Quantity, inside: Quantity, domains: Quantity
) -> CollectiveLine:
    """Coefficients of a ring through every rank of every domain (A3)."""
    edges = np.subtract(domains, 1)
    rate = np.minimum(_scale_up_bytes_per_s(fits, inside), _members_bytes_per_s(machine, inside))
    return CollectiveLine(
        latency_s=_latency_s(fits, ranks - edges) + machine.network.latency_s * edges,
        seconds_per_byte=1.0 / rate,
        sqrt_s=_sqrt_s(fits, inside),
    )


def _tree_across(
    machine: Machine, fits: Sequence[CollectiveFit], *, ranks: Quantity, inside: Quantity
) -> CollectiveLine:
    """Coefficients of an all-reduce over two domains, each of which sends its buffer once (A4)."""
    network_share = 0.5 * ranks / np.maximum(np.subtract(ranks, 1), 1)
    rate = np.minimum(_scale_up_bytes_per_s(fits, inside), _members_bytes_per_s(machine, inside) / network_share)
    start = _latency_s(fits, inside) + 2.0 * machine.network.latency_s
    return CollectiveLine(latency_s=start, seconds_per_byte=1.0 / rate, sqrt_s=2.0 * np.sqrt(start / rate))


def _alltoall_across_s(machine: Machine, *, size_bytes: Quantity, ranks: Quantity, inside: Quantity) -> Quantity:
    """Time of an all-to-all whose members lie in several domains (A5)."""
    fits = _fits(machine, Collective.ALL_TO_ALL)
    ranks, inside = np.asarray(ranks, dtype=np.float64), np.asarray(inside, dtype=np.float64)
    network = machine.network
    remote = size_bytes * (ranks - inside) / ranks
    local = size_bytes * np.maximum(np.subtract(inside, 1), 0) / ranks
    sending = remote / (network.bytes_per_s * network.alltoall_efficiency_ratio)
    within = local / _bytes_per_s(fits, inside) + _sqrt_s(fits, inside) * np.sqrt(local)
    return _latency_s(fits, ranks) + network.latency_s + np.maximum(sending, within)
