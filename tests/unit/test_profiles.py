from pathlib import Path

import pytest

from ap_search.errors import SpecError
from ap_search.spec.presets import locate, preset_names
from ap_search.spec.profiles import ProfileFile, load_software
from ap_search.spec.reader import read_mapping

# Words, not values with an origin.
NOT_VALUES = ("name", "description", "recognised_by", "sources", "left_out_errors")


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_default_preset_is_the_default_of_the_schema() -> None:
    """A file that gives its name only behaves as `default`, so every default stands in one documented file too."""
    given = read_mapping(locate("software", "default"))
    for key, field in ProfileFile.model_fields.items():
        if key not in NOT_VALUES:
            assert given[key] == field.default, key


def test_times_become_seconds(tmp_path: Path) -> None:
    software = load_software(write(tmp_path, "name: mine\nlaunch_per_layer_us: 30\nlaunch_per_moe_layer_us: 400\n"))
    assert software.launch_per_layer_s == pytest.approx(30e-6)
    assert software.launch_per_moe_layer_s == pytest.approx(400e-6)
    assert "launch_per_layer_us: mine.yaml" in software.sources
    assert "weight_bytes: as in profile default" in software.sources


@pytest.mark.parametrize("name", preset_names("software"))
def test_every_value_of_a_preset_has_a_source(name: str) -> None:
    given = read_mapping(locate("software", name))
    sources = given["sources"]
    assert isinstance(sources, dict)
    assert set(given) - set(NOT_VALUES) == set(sources)
    assert given["name"] == name
    assert load_software(name).description


def test_no_overlap_hides_nothing_and_is_otherwise_the_default() -> None:
    default, bare = read_mapping(locate("software", "default")), read_mapping(locate("software", "no-overlap"))
    shares = {key for key in default if key.endswith("_overlap_ratio")}
    assert {key for key in bare if key not in NOT_VALUES} == shares
    assert all(bare[key] == 0.0 for key in shares)


def test_bytes_per_parameter_of_the_trainers() -> None:
    """Megatron 2 + 4 + 12 = 18, with bf16 moments 6 + 6 = 12; TorchTitan 4 + 4 + 8 = 16; DeepSpeed 2 + 2 + 12 = 16."""

    def state(name: str) -> int:
        software = load_software(name)
        return software.weight_bytes + software.gradient_bytes + software.master_bytes + software.moment_bytes

    assert [state(name) for name in ("megatron-core", "megatron-core-graphs", "torchtitan", "deepspeed")] == [
        18,
        12,
        16,
        16,
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ep_overlap_ratio: 1.5", "ep_overlap_ratio: is 1.5"),
        ("fused_norm: 1", "fused_norm"),
        ("vocab_divisor: 0", "vocab_divisor: is 0"),
        ("overlap: 0.5", "overlap: is not a known key"),
        ("sources: {moment_bytes: somewhere}", "names moment_bytes, which this file does not give"),
    ],
)
def test_faults_name_the_key(tmp_path: Path, line: str, expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_software(write(tmp_path, f"name: mine\n{line}\n"))
    assert expected in str(caught.value.faults[0])


def test_every_key_is_described() -> None:
    assert all(field.description for field in ProfileFile.model_fields.values())


def test_the_guide_names_every_key_and_preset() -> None:
    guide = (Path(__file__).resolve().parents[2] / "docs/guides/software-profiles.md").read_text(encoding="utf-8")
    assert [key for key in ProfileFile.model_fields if f"`{key}`" not in guide] == []
    assert [name for name in preset_names("software") if f"`{name}`" not in guide] == []
