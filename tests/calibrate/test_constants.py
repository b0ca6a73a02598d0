"""The list of constants stands in the schemas; completed files change no figure; nothing moves beyond physics."""

import math
from dataclasses import fields

import pytest

from ap_search.spec.calibrated import cluster_content, machine_from, software_content, software_from
from ap_search.spec.cluster import load_cluster
from ap_search.spec.constants import CONSTANTS, Effect, Home, moved, room, values_of
from ap_search.spec.presets import preset_names
from ap_search.spec.profiles import load_software

ORIGINS = ("sources", "assumed", "provenance")


@pytest.mark.parametrize("name", preset_names("clusters"))
def test_a_completed_cluster_is_the_same_machine(name):
    mine, shipped = machine_from(cluster_content(name), name), load_cluster(name)
    assert {field.name for field in fields(mine) if getattr(mine, field.name) != getattr(shipped, field.name)} <= set(
        ORIGINS
    )


@pytest.mark.parametrize("name", preset_names("software"))
def test_a_completed_profile_is_the_same_software(name):
    mine, shipped = software_from(software_content(name), name), load_software(name)
    assert {field.name for field in fields(mine) if getattr(mine, field.name) != getattr(shipped, field.name)} <= set(
        ORIGINS
    )


@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda constant: constant.name)
def test_every_key_stands_in_completed_files(constant):
    kind, content = ("clusters", cluster_content) if constant.home is Home.CLUSTER else ("software", software_content)
    for name in preset_names(kind):
        for key in constant.keys:
            assert values_of(content(name), key), (name, key)


@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda constant: constant.name)
@pytest.mark.parametrize("end", [0, 1])
def test_constants_at_their_bounds_are_legal_files(constant, end):
    content = cluster_content("ascend-910b") if constant.home is Home.CLUSTER else software_content("torchtitan")
    read = machine_from if constant.home is Home.CLUSTER else software_from
    read(moved(content, constant, room(content, constant)[end]), "moved")


def test_no_share_exceeds_one_and_no_rate_its_link():
    content = cluster_content("h100-sxm")
    far = dict(content)
    for constant in CONSTANTS:
        if constant.home is Home.CLUSTER:
            far = moved(far, constant, math.log(100.0))
    for constant in CONSTANTS:
        for key in constant.keys if constant.home is Home.CLUSTER and not constant.links else ():
            assert set(values_of(far, key)) == {1.0}, key
    for entry in far["collectives"]:
        assert entry["gbyte_per_s"] == (900.0 if entry["collective"] == "all_reduce" else 450.0)
    assert far["dispatch"]["network_gbyte_per_s"] == 50.0


def test_what_faster_means():
    software = software_content("default")
    for constant in (constant for constant in CONSTANTS if constant.home is Home.SOFTWARE):
        before, after = software[constant.keys[0]], moved(software, constant, math.log(2.0))[constant.keys[0]]
        if constant.effect is Effect.TIME:
            assert after == before / 2
        elif constant.effect is Effect.OVERLAP:
            assert 1 - after == pytest.approx((1 - before) / 2)
        else:
            assert after == min(1.0, 2 * before)


def test_what_is_zero_or_hidden_whole_has_no_room():
    software = software_content("default") | {"launch_per_layer_us": 0.0, "tp_overlap_ratio": 1.0}
    by_name = {constant.name: constant for constant in CONSTANTS}
    assert room(software, by_name["launch_per_layer"]) == (0.0, 0.0)
    assert room(software, by_name["tp_overlap"])[1] == 0.0
    assert room(software_content("no-overlap"), by_name["tp_overlap"])[0] == 0.0
