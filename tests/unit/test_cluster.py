import math
from pathlib import Path

import pytest

from ap_search.errors import SpecError
from ap_search.spec.cluster import load_cluster
from ap_search.spec.cluster_file import ClusterFile
from ap_search.spec.machine import Collective
from ap_search.spec.presets import locate, preset_names
from ap_search.spec.reader import read_mapping

LEAST = """
name: mine
hbm_gib: 64
bf16_tflops: 300
hbm_tb_per_s: 2
devices_per_domain: 8
scale_up_gbyte_per_s: 200
nic_gbit_per_s: 100
"""
NOT_VALUES = {"name", "device", "recognised_by", "sources", "assumed"}


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def faults(folder: Path, text: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load_cluster(write(folder, text))
    return [str(fault) for fault in caught.value.faults]


def test_least_file_in_si_units(tmp_path: Path) -> None:
    """64 GiB = 68,719,476,736 B; 300 TFLOP/s = 3e14; 2 TB/s = 2e12; 100 Gbit/s = 12.5e9 B/s."""
    machine = load_cluster(write(tmp_path, LEAST))
    assert machine.device_memory_bytes == 68_719_476_736
    assert machine.peak_bf16_flops_per_s == 3e14
    assert machine.peak_fp8_flops_per_s == 0.0
    assert machine.hbm_bytes_per_s == 2e12
    assert machine.network.bytes_per_s == 12.5e9
    assert machine.scale_up.bytes_per_s == machine.scale_up.pair_bytes_per_s == 200e9
    assert machine.domain_size(8) == machine.domain_size(64) == 8


def test_least_file_says_what_it_left_to_defaults(tmp_path: Path) -> None:
    machine = load_cluster(write(tmp_path, LEAST))
    assert {"sm_count", "reserve_gib", "gemm", "attention", "dispatch", "collectives.all_reduce"} <= set(
        machine.assumed
    )
    assert "bf16_tflops" not in machine.assumed
    assert "gemm_fp8" not in machine.assumed
    assert set(dict(machine.provenance).values()) == {"default"}
    sources = dict(machine.sources)
    assert sources["bf16_tflops"] == "mine.yaml"
    assert sources["gemm"].startswith("default: ")


def test_default_constants_by_their_rules(tmp_path: Path) -> None:
    """Dense 0.70, so attention 0.56 and experts 0.763; 8 ranks behind a switch 0.80 x 200, two ranks 0.75 x 200 GB/s.

    DeepEP on an H100 moves 0.745 of its links and 0.814 of its NIC: 149 and 10.175 GB/s here.
    """
    machine = load_cluster(write(tmp_path, LEAST))
    assert machine.gemm.efficiency_ratio == 0.70
    assert machine.attention.efficiency_ratio == pytest.approx(0.56)
    assert machine.grouped_gemm.efficiency_ratio == pytest.approx(0.763)
    rates = {fit.ranks: fit.bytes_per_s for fit in machine.collectives if fit.collective is Collective.ALL_GATHER}
    assert rates == {2: pytest.approx(150e9), 8: pytest.approx(160e9)}
    assert machine.dispatch.scale_up_bytes_per_s == pytest.approx(149e9)
    assert machine.dispatch.network_bytes_per_s == pytest.approx(10.175e9)


def test_full_mesh_gives_two_ranks_one_link(tmp_path: Path) -> None:
    """Seven links of 28 GB/s: 0.75 x 28 = 21 over two ranks, 0.80 x 196 = 156.8 over eight."""
    text = LEAST.replace("scale_up_gbyte_per_s: 200", "scale_up_gbyte_per_s: 196\npair_gbyte_per_s: 28")
    machine = load_cluster(write(tmp_path, text))
    rates = {fit.ranks: fit.bytes_per_s for fit in machine.collectives if fit.collective is Collective.ALL_REDUCE}
    assert rates == {2: pytest.approx(21e9), 8: pytest.approx(156.8e9)}
    assert machine.scale_up.pair_bytes_per_s == 28e9


def test_gigabytes_count_a_thousand_cubed_and_are_said_to_be_assumed(tmp_path: Path) -> None:
    machine = load_cluster(write(tmp_path, LEAST.replace("hbm_gib: 64", "hbm_gb: 64")))
    assert machine.device_memory_bytes == 64_000_000_000
    assert "hbm_gb" in machine.assumed


def test_given_constants_are_taken_and_the_rest_of_a_section_is_assumed(tmp_path: Path) -> None:
    """One given collective is calibrated, the other three stay defaults."""
    text = LEAST + (
        "gemm: {efficiency_ratio: 0.5, launch_us: 4}\n"
        "collectives:\n  - {collective: alltoall, ranks: 8, latency_us: 9, gbyte_per_s: 120, sqrt_ns: 3}\n"
        "sources: {gemm: my own log}\n"
        "assumed: [nic_gbit_per_s]\n"
    )
    machine = load_cluster(write(tmp_path, text))
    assert (machine.gemm.efficiency_ratio, machine.gemm.hbm_efficiency_ratio) == (0.5, 0.8)
    assert machine.gemm.launch_s == pytest.approx(4e-6)
    assert {"gemm.hbm_efficiency_ratio", "gemm.wgrad_ratio", "nic_gbit_per_s"} <= set(machine.assumed)
    assert "gemm.efficiency_ratio" not in machine.assumed
    assert dict(machine.sources)["gemm"] == "my own log"
    provenance = dict(machine.provenance)
    assert provenance["collectives.alltoall"] == "calibrated"
    assert provenance["collectives.all_reduce"] == "default"
    (fit,) = (fit for fit in machine.collectives if fit.collective is Collective.ALL_TO_ALL)
    assert (fit.ranks, fit.bytes_per_s) == (8, 120e9)
    assert (fit.latency_s, fit.sqrt_s) == (pytest.approx(9e-6), pytest.approx(3e-9))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("hbm_gb: 60", "give the memory once"),
        ("scale_up_size: 4", "devices_per_domain is more than scale_up_size"),
        ("pair_gbyte_per_s: 300", "pair_gbyte_per_s is more than scale_up_gbyte_per_s"),
        ("bf16_tflop: 3", "bf16_tflop: is not a known key (legal: bf16_tflops"),
        ("sm_count: 0", "sm_count: is 0"),
        ("sm_count: '12'", "sm_count: is text"),
        ("gemm: {efficiency_ratio: 1.2}", "gemm.efficiency_ratio: is 1.2"),
        ("network_latency_us: .inf", "network_latency_us"),
        ("sources: {sm_count: somewhere}", "names sm_count, which this file does not give"),
        ("grouped_gemm: {efficiency_ratio: 0.5, wgrad_rows: [1, 2]}", "must have the same length"),
        ("collectives: [{collective: gather, ranks: 8, latency_us: 1, gbyte_per_s: 1}]", "collectives[0].collective"),
    ],
)
def test_faults_name_the_key(tmp_path: Path, line: str, expected: str) -> None:
    (fault,) = faults(tmp_path, LEAST + line + "\n")
    assert expected in fault
    assert fault.startswith("mine.yaml")


def test_all_faults_at_once(tmp_path: Path) -> None:
    found = faults(tmp_path, LEAST.replace("bf16_tflops: 300", "bf16_tflops: -1").replace("name: mine", "nam: mine"))
    assert len(found) == 3


def test_presets_are_there() -> None:
    assert set(preset_names("clusters")) >= {
        "a100-40-sxm",
        "a100-80-sxm",
        "h100-sxm",
        "h800-sxm",
        "h20-sxm",
        "h200-sxm",
        "b200-sxm",
        "b300-sxm",
        "gb200-nvl72",
        "gb300-nvl72",
        "mi300x",
        "mi355x",
        "ascend-910b",
        "ascend-910c",
    }


@pytest.mark.parametrize("name", preset_names("clusters"))
def test_every_value_of_a_preset_has_a_source(name: str) -> None:
    given = read_mapping(locate("clusters", name))
    sources = given["sources"]
    assert isinstance(sources, dict)
    assert set(given) - NOT_VALUES == set(sources)
    assert all(len(str(source)) > 5 for source in sources.values())
    assert given["name"] == name


@pytest.mark.parametrize("name", preset_names("clusters"))
def test_presets_make_sense(name: str) -> None:
    """Bandwidths within their links, NVLS all-reduce (1.22 of them at most) apart; efficiencies within 0..1."""
    machine = load_cluster(name)
    assert machine.device_memory_bytes > 4 * machine.reserve_bytes
    assert machine.scale_up.pair_bytes_per_s <= machine.scale_up.bytes_per_s
    assert machine.network.bytes_per_s <= machine.scale_up.bytes_per_s
    for fit in machine.collectives:
        bound = 1.22 if fit.collective is Collective.ALL_REDUCE else 1.0
        assert fit.bytes_per_s <= bound * machine.scale_up.bytes_per_s
    for collective in Collective:
        fits = sorted((fit.ranks, fit.latency_s) for fit in machine.collectives if fit.collective is collective)
        assert fits[0][0] == 2
        assert [latency for _, latency in fits] == sorted(latency for _, latency in fits)
    assert machine.dispatch.network_bytes_per_s < machine.network.bytes_per_s
    assert 0.3 < machine.attention.efficiency_ratio < machine.gemm.efficiency_ratio <= 0.91


def test_a_rack_edge_is_a_level_of_its_own() -> None:
    """72 devices share one NVLink domain; a larger job takes 64 of each rack."""
    machine = load_cluster("gb200-nvl72")
    assert [(level.name, level.size) for level in machine.levels] == [("scale-up", 72), ("rack edge", 0)]
    assert (machine.domain_size(72), machine.domain_size(73), machine.domain_size(128)) == (72, 64, 64)
    assert machine.network.domain_bytes_per_s == 430e9
    assert load_cluster("h100-sxm").network.domain_bytes_per_s == math.inf


def test_unsourced_values_of_presets_are_said_to_be_assumed() -> None:
    assert "nic_gbit_per_s" in load_cluster("h20-sxm").assumed
    assert "nic_gbit_per_s" in load_cluster("mi355x").assumed
    assert "sm_count" in load_cluster("gb300-nvl72").assumed
    assert "gemm" in load_cluster("ascend-910b").assumed
    assert "nic_gbit_per_s" not in load_cluster("h100-sxm").assumed


def test_every_key_is_described() -> None:
    assert all(field.description for field in ClusterFile.model_fields.values())


def test_the_guide_names_every_key_and_preset() -> None:
    guide = (Path(__file__).resolve().parents[2] / "docs/guides/cluster-files.md").read_text(encoding="utf-8")
    assert [key for key in ClusterFile.model_fields if f"`{key}`" not in guide] == []
    assert [name for name in preset_names("clusters") if name not in guide] == []
