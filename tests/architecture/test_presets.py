"""Every preset loads, and names the source of what it says."""

import pytest
import yaml
from pydantic import BaseModel

from ap_search.spec.cluster import load_cluster
from ap_search.spec.cluster_file import ClusterFile
from ap_search.spec.load import LoadFile
from ap_search.spec.model import load_model
from ap_search.spec.presets import preset_names
from ap_search.spec.profiles import ProfileFile, load_software
from tests.architecture.source import ROOT

CONFIGS = ROOT / "configs"
NAMES = {kind: sorted(path.stem for path in (CONFIGS / kind).iterdir()) for kind in ("models", "clusters", "software")}


def _written(kind: str, name: str) -> dict[str, object]:
    """A preset's file as it is written."""
    content = yaml.safe_load((CONFIGS / kind / f"{name}.yaml").read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def _without_source(content: dict[str, object], needless: set[str]) -> set[str]:
    """Keys of a file whose origin it does not name."""
    sources = content["sources"]
    assert isinstance(sources, dict)
    named = {key for key, origin in sources.items() if str(origin).strip()}
    return set(content) - named - needless


@pytest.mark.parametrize("kind", NAMES)
def test_every_file_is_a_preset(kind: str) -> None:
    """The folder and the list of presets are the same."""
    assert sorted(preset_names(kind)) == NAMES[kind] != []


@pytest.mark.parametrize("name", NAMES["models"])
def test_models_load_and_name_their_sources(name: str) -> None:
    """A model preset has sources, says where its published size is from, and does not contradict it."""
    content = _written("models", name)
    assert content.get("sources"), "no sources"
    published = content.get("published")
    assert published is None or (isinstance(published, dict) and published.get("source"))
    model = load_model(name)
    assert model.name == name
    assert model.sources
    assert not model.warnings


@pytest.mark.parametrize("name", NAMES["clusters"])
def test_clusters_load_and_name_their_sources(name: str) -> None:
    """Every value of a cluster preset has its origin; what is assumed is a value of the file."""
    content = _written("clusters", name)
    assert not _without_source(content, {"name", "device", "recognised_by", "sources", "assumed"})
    assert set(content) <= set(ClusterFile.model_fields)
    machine = load_cluster(name)
    assert machine.name == name
    assert dict(machine.sources)


@pytest.mark.parametrize("name", NAMES["software"])
def test_profiles_load_and_name_their_sources(name: str) -> None:
    """Every value of a software profile has its origin; a profile states what it has otherwise than `default`."""
    content = _written("software", name)
    assert not _without_source(content, {"name", "description", "recognised_by", "sources"})
    assert load_software(name).name == name
    if name != "default":
        default = _written("software", "default")
        values = {key for key in content if key not in {"name", "description", "recognised_by", "sources"}}
        assert not {key for key in values if content[key] == default[key] and name != "no-overlap"}


def test_the_default_profile_is_what_absent_keys_mean() -> None:
    """A key left out of a profile has the value of the preset `default`, which states every key."""
    content = _written("software", "default")
    assert set(content) | {"recognised_by", "left_out_errors"} == set(ProfileFile.model_fields)
    defaults = {key: field.default for key, field in ProfileFile.model_fields.items() if key in content}
    for key in ("name", "description", "sources"):
        defaults.pop(key)
    assert {key: content[key] for key in defaults} == defaults


def test_edges_are_frozen_refuse_unknown_keys_and_describe_each_field() -> None:
    """Every pydantic model of spec/."""
    edges = _edges()
    assert LoadFile in edges
    faults = [edge.__name__ for edge in edges if not edge.model_config.get("frozen")]
    faults += [edge.__name__ for edge in edges if edge.model_config.get("extra") != "forbid"]
    faults += [
        f"{edge.__name__}.{name}"
        for edge in edges
        for name, field in edge.model_fields.items()
        if not field.description and name != "provenance"
    ]
    assert not faults


def _edges() -> list[type]:
    """Pydantic models that the modules of spec/ define, bases without fields left out."""
    found: list[type] = []
    queue: list[type] = [BaseModel]
    while queue:
        for child in queue.pop().__subclasses__():
            queue.append(child)
            if child.__module__.startswith("ap_search.spec") and child.model_fields:
                found.append(child)
    return found
