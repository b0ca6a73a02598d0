"""Bad files: one line per fault, with the path and what would be legal; nothing else escapes."""

from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from ap_search.errors import SpecError
from ap_search.spec.presets import locate, preset_names
from ap_search.spec.reader import MAX_FILE_BYTES, read_mapping, validate


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def fault_of(path: Path) -> str:
    with pytest.raises(SpecError) as caught:
        read_mapping(path)
    assert all("\n" not in str(fault) for fault in caught.value.faults)
    return str(caught.value)


def test_plain_values(tmp_path: Path) -> None:
    text = "a: 1e-6\nb: {c: [1, 2], d: -3.5E4}\ne: yes\nno: 2024-01-01\n"
    assert read_mapping(written(tmp_path, "a.yaml", text)) == {
        "a": 1e-6,
        "b": {"c": [1, 2], "d": -3.5e4},
        "e": True,
        "no": "2024-01-01",
    }


def test_json_by_suffix_or_by_content(tmp_path: Path) -> None:
    content = '{"a": [0.0, Infinity], "b": null}'
    for name in ("a.json", "config"):
        assert read_mapping(written(tmp_path, name, content)) == {"a": [0.0, float("inf")], "b": None}


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.yaml", "", "is empty"),
        ("a.yaml", " \n\n", "is empty"),
        ("a.yaml", b"\xff\xfea\x00", "is not UTF-8 text"),
        ("a.yaml", "- 1\n- 2\n", "must be a mapping"),
        ("a.yaml", "# only this\n", "must be a mapping"),
        ("a.yaml", "a: &x [1, 1]\nb: [*x, *x]\n", "line 2, column 5: aliases"),
        ("a.yaml", "a: &x {y: 1}\nb: {<<: *x}\n", "aliases"),
        ("a.yaml", "a: 1\nb: {c: 1, c: 2}\n", "line 2, column 11: key 'c' appears twice"),
        ("a.json", '{"a": 1, "a": 2}', "key 'a' appears twice"),
        ("a.yaml", "a: [1,\nb: 2\n", "line 3, column 1"),
        ("a.json", '{"a": 1,}', "line 1, column 9"),
        ("a.yaml", "a: " + "[" * 3000 + "]" * 3000, "nested deeper than 64"),
        ("a.json", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested deeper than 64"),
        ("a.json", '{"a": ' + "[" * 100 + "]" * 100 + "}", "nested deeper than 64"),
        ("a.yaml", 'a: !!python/object/apply:os.system ["touch x"]\n', "tags"),
        ("a.yaml", "a: 1\n---\nb: 2\n", "another document"),
        ("a.yaml", "? [a, b]\n: 1\n", "a key must be a plain word"),
        ("a.yaml", b"a: \x00", "unacceptable character"),
        ("a.yaml", "a: " + "9" * 5000, "is not YAML"),
        ("a.json", '{"a": ' + "9" * 5000 + "}", "is not JSON"),
    ],
)
def test_bad_content(tmp_path: Path, name: str, content: str | bytes, expected: str) -> None:
    message = fault_of(written(tmp_path, name, content))
    assert expected in message
    assert name in message


def test_a_large_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    with path.open("wb") as file:
        file.truncate(50 * 1024**2)
    message = fault_of(path)
    assert "50.0 MiB" in message
    assert f"{MAX_FILE_BYTES // 1024**2} MiB" in message


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    assert "no such file" in fault_of(tmp_path / "absent.yaml")
    assert "is a folder" in fault_of(tmp_path)
    assert "cannot be read" in fault_of(Path("a\0b"))


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    kind: Literal["gqa", "mla"] = "gqa"
    num_heads: int = Field(gt=0)


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    hidden_size: int = Field(gt=0)
    attention: Inner
    items: list[Inner] = []
    either: int | list[int] = 1


def lines_of(data: dict[str, object]) -> list[str]:
    with pytest.raises(SpecError) as caught:
        validate(Outer, data, "f.yaml")
    return [str(fault) for fault in caught.value.faults]


def test_all_faults_at_once_with_paths() -> None:
    lines = lines_of(
        {
            "hidden": 3,
            "attention": {"kind": "gqb", "num_head": 3, "num_heads": -2},
            "items": [{"num_heads": "x", "z": 1}],
        }
    )
    assert lines == [
        "f.yaml: hidden_size: is required and missing",
        "f.yaml: attention.kind: is 'gqb' (legal: gqa or mla)",
        "f.yaml: attention.num_heads: is -2 (legal: > 0)",
        "f.yaml: attention.num_head: is not a known key (legal: num_heads)",
        "f.yaml: items[0].num_heads: is text ('x') (legal: a whole number)",
        "f.yaml: items[0].z: is not a known key (legal: kind, num_heads)",
        "f.yaml: hidden: is not a known key (legal: hidden_size)",
    ]


def test_wrong_types() -> None:
    lines = lines_of({"hidden_size": True, "attention": 4, "items": {}, "either": [1, "x"]})
    assert "f.yaml: hidden_size: is a true/false value (True) (legal: a whole number)" in lines
    assert "f.yaml: attention: is a number (4) (legal: a mapping)" in lines
    assert "f.yaml: items: is a mapping ({}) (legal: a list)" in lines
    assert "f.yaml: either[1]: is text ('x') (legal: a whole number)" in lines


def test_a_float_is_no_whole_number() -> None:
    assert lines_of({"hidden_size": 3.5, "attention": {"num_heads": 1}}) == [
        "f.yaml: hidden_size: is a number (3.5) (legal: a whole number)"
    ]


def test_presets_by_name_and_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    preset = locate("models", "toy-moe")
    assert preset.is_file()
    for meant in ("TOY-MoE", "configs/models/toy-moe.yaml", "../configs/models/toy-moe.yaml"):
        assert locate("models", meant) == preset
    own = written(tmp_path, "own.yaml", "a: 1")
    assert locate("models", str(own)) == own
    assert locate("models", own) == own


@pytest.mark.parametrize("name", ["", "toy-mos", "toy", "deepseek-v2", "qwen3", "no/such.yaml", "x" * 5000, "a\0b"])
def test_unknown_names_are_told_the_nearest(name: str) -> None:
    """The beginning of a name is none: deepseek-v2 is another model than the preset deepseek-v2-lite."""
    with pytest.raises(SpecError) as caught:
        locate("models", name)
    assert caught.value.faults[0].legal
    assert set(caught.value.faults[0].legal.split(", ")) <= set(preset_names("models"))


def test_a_kind_without_presets_has_none() -> None:
    assert preset_names("nothing") == ()
