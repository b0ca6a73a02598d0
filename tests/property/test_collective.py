from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from ap_search.cost.collective import collective_time_s, point_to_point_time_s, sent_bytes
from ap_search.spec.cluster import load_cluster
from ap_search.spec.machine import Collective, Machine
from ap_search.spec.presets import preset_names

MACHINES = {name: load_cluster(name) for name in preset_names("clusters")}
LAWS = settings(max_examples=60, deadline=None)

machines = st.sampled_from(sorted(MACHINES)).map(MACHINES.__getitem__)
collectives = st.sampled_from(list(Collective))
sizes = st.floats(min_value=1.0, max_value=1e11)
members = st.integers(min_value=1, max_value=8)
spans = st.integers(min_value=1, max_value=64)
factors = st.floats(min_value=1.0, max_value=16.0)


def time_s(machine: Machine, collective: Collective, size: float, inside: int, domains: int) -> float:
    return float(
        collective_time_s(
            machine, collective, size_bytes=size, ranks=inside * domains, ranks_per_domain=inside, domains=domains
        )
    )


def faster(machine: Machine, *, inside: float, network: float) -> Machine:
    """The same machine with each bandwidth times a factor."""
    fits = tuple(replace(fit, bytes_per_s=fit.bytes_per_s * inside) for fit in machine.collectives)
    edge = machine.network
    wider = replace(edge, bytes_per_s=edge.bytes_per_s * network, domain_bytes_per_s=edge.domain_bytes_per_s * network)
    return replace(machine, collectives=fits, levels=(machine.scale_up, wider))


@LAWS
@given(machines, collectives, sizes, members, spans, factors, factors)
def test_more_bandwidth_is_never_slower(
    machine: Machine, collective: Collective, size: float, inside: int, domains: int, up: float, out: float
) -> None:
    before = time_s(machine, collective, size, inside, domains)
    after = time_s(faster(machine, inside=up, network=out), collective, size, inside, domains)
    assert after <= before * (1 + 1e-12)


@LAWS
@given(machines, collectives, sizes, members, spans, factors)
def test_more_bytes_are_never_faster(
    machine: Machine, collective: Collective, size: float, inside: int, domains: int, more: float
) -> None:
    small, large = (time_s(machine, collective, s, inside, domains) for s in (size, size * more))
    assert small <= large * (1 + 1e-12)


@LAWS
@given(machines, collectives, sizes)
def test_a_group_of_one_takes_no_time_and_sends_nothing(machine: Machine, collective: Collective, size: float) -> None:
    assert time_s(machine, collective, size, 1, 1) == 0.0
    assert sent_bytes(collective, size_bytes=size, ranks=1) == 0.0


@LAWS
@given(machines, collectives, sizes, members, spans)
def test_time_is_finite_and_positive(
    machine: Machine, collective: Collective, size: float, inside: int, domains: int
) -> None:
    time = time_s(machine, collective, size, inside, domains)
    assert time > 0.0 if inside * domains > 1 else time == 0.0
    assert time < 1e4


@LAWS
@given(machines, collectives, sizes, members, st.integers(min_value=3, max_value=64))
def test_one_more_domain_is_never_faster_from_three_on(
    machine: Machine, collective: Collective, size: float, inside: int, domains: int
) -> None:
    fewer, more = (time_s(machine, collective, size, inside, span) for span in (domains, domains + 1))
    assert fewer <= more * (1 + 1e-12)


@LAWS
@given(machines, sizes, st.booleans(), factors)
def test_messages_obey_the_same_laws(machine: Machine, size: float, crosses: bool, factor: float) -> None:
    def message(which: Machine, size_bytes: float) -> float:
        return float(point_to_point_time_s(which, size_bytes=size_bytes, crosses_domain=crosses))

    base = message(machine, size)
    assert message(faster(machine, inside=factor, network=factor), size) <= base * (1 + 1e-12)
    assert base <= message(machine, size * factor) * (1 + 1e-12)


@LAWS
@given(sizes, st.integers(min_value=2, max_value=4096))
def test_reduce_scatter_and_all_gather_send_an_all_reduce_together(size: float, ranks: int) -> None:
    parts = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
    together = sum(float(sent_bytes(part, size_bytes=size, ranks=ranks)) for part in parts)
    assert abs(together - float(sent_bytes(Collective.ALL_REDUCE, size_bytes=size, ranks=ranks))) <= 1e-9 * size
