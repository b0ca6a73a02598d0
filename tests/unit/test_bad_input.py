"""Bad input, through the command: exit code 2, one line per fault on stderr, nothing on stdout, nothing written."""

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ap_search import search
from ap_search.errors import SpecError
from tests.unit.test_end_to_end import TOY, run

MIB = 2**20
ESTIMATE = ["estimate", *TOY]
Refused = Callable[..., list[str]]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Run a command in a folder of its own; return its faults."""
    monkeypatch.chdir(tmp_path)

    def faults(*argv: str) -> list[str]:
        before = sorted(path.name for path in tmp_path.iterdir())
        code, out, err = run(*argv, "--json", "result.json")
        lines = err.splitlines()
        assert (code, out) == (2, ""), err
        assert lines
        assert all(line.startswith("ap-search: error: ") for line in lines), err
        assert "Traceback" not in err
        assert sorted(path.name for path in tmp_path.iterdir()) == before, "nothing is written"
        return [line.removeprefix("ap-search: error: ") for line in lines]

    return faults


def lines_start(lines: Sequence[str], *starts: str) -> bool:
    """Whether there is one line for each start, in that order."""
    return len(lines) == len(starts) and all(map(str.startswith, lines, starts))


BOMB = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 8)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
CONTENT = {
    "empty.yaml": (b"", "is empty"),
    "blank.yaml": (b"\n# nothing\n", "must be a mapping of keys to values, not nothing"),
    "latin.yaml": ("name: caf\xe9\n".encode("latin-1"), "is not UTF-8"),
    "bomb.yaml": (BOMB.encode(), "line 2, column 8: aliases"),
    "twice.yaml": (b"name: a\nname: b\n", "line 2, column 1: key 'name' appears twice"),
    "twice.json": (b'{"name": 1, "name": 2}', "key 'name' appears twice"),
    "code.yaml": (b"name: !!python/object/apply:os.getcwd []\n", "line 1, column 7: tags"),
    "list.yaml": (b"- 1\n- 2\n", "must be a mapping"),
    "broken.json": (b'{"name": ', "is not JSON: line 1, column 10"),
    "broken.yaml": (b"name: [1, 2\n", "line "),
    "deep.json": (b"[" * 5000 + b"]" * 5000, "nested deeper"),
}


@pytest.mark.parametrize("flag", ["--model", "--cluster", "--software"])
@pytest.mark.parametrize("name", CONTENT)
def test_files_that_cannot_be_read(refused: Refused, tmp_path: Path, flag: str, name: str) -> None:
    content, reason = CONTENT[name]
    (tmp_path / name).write_bytes(content)
    job = TOY[2:] if flag == "--model" else TOY
    (line,) = refused(*job, flag, name)
    assert line.startswith(f"{name}: "), line
    assert reason in line


@pytest.mark.parametrize("flag", ["--model", "--cluster", "--software"])
def test_files_that_are_not_files(refused: Refused, tmp_path: Path, flag: str) -> None:
    job = TOY[2:] if flag == "--model" else TOY
    with (tmp_path / "large.yaml").open("wb") as file:
        file.truncate(50 * MIB)
    assert lines_start(refused(*job, flag, "large.yaml"), "large.yaml: is 50.0 MiB (legal: files up to 4 MiB)")
    assert lines_start(refused(*job, flag, "absent.yaml"), "absent.yaml: there is no such file (legal: ")
    assert lines_start(refused(*job, flag, "no-preset"), "no-preset: is neither a preset nor a file (legal: ")
    (tmp_path / "folder.yaml").mkdir()
    assert lines_start(refused(*job, flag, "folder.yaml"), "folder.yaml: is a folder")


def test_every_fault_of_a_model_file_has_its_path(refused: Refused, tmp_path: Path) -> None:
    text = (
        "hidden_size: 64*2\nvocab_size: 512\nnum_layers: -3\nattention: {num_heads: 0}\nffn: {width: 1.5}\nlayers: 4\n"
    )
    (tmp_path / "m.yaml").write_text(text)
    lines = refused("--model", "m.yaml", "--devices", "8")
    assert sorted(line.split(":")[1].strip() for line in lines) == [
        "attention.num_heads",
        "ffn.width",
        "hidden_size",
        "layers",
        "num_layers",
    ]
    assert all("(legal: " in line for line in lines)


HISTOGRAMS = {
    "short.json": ("[1, 2, 3]", "has 3 numbers (legal: 8, one per expert)"),
    "rows.json": (json.dumps([[1] * 8] * 2), "(legal: "),  # 3 MoE layers
    "nan.json": ("[1, 2, 3, NaN, 1, 1, 1, 1]", "expert 3: is nan"),
    "nan.csv": ("1,2,3,nan,1,1,1,1\n", "expert 3: is nan"),
    "inf.yaml": ("[1, 2, 3, .inf, 1, 1, 1, 1]\n", "expert 3: is inf"),
    "negative.yaml": ("tokens_per_expert: [1, 1, -1, 1, 1, 1, 1, 1]\n", "expert 2: is -1"),
    "words.csv": ("1,2,x,4,1,1,1,1\n", "expert 2"),
    "zero.json": ("[0, 0, 0, 0, 0, 0, 0, 0]", "zero"),
    "key.yaml": ("tokens: [1, 1, 1, 1, 1, 1, 1, 1]\n", "tokens"),
    "empty.csv": ("", "is empty"),
}


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_histograms_that_are_none(refused: Refused, tmp_path: Path, name: str) -> None:
    text, reason = HISTOGRAMS[name]
    (tmp_path / name).write_text(text)
    (line,) = refused(*TOY, "--load", name)
    assert line.startswith(name), line
    assert reason in line


def test_arrays_that_are_no_histogram(refused: Refused, tmp_path: Path) -> None:
    np.save(tmp_path / "nan.npy", np.array([1.0, np.nan, 1, 1, 1, 1, 1, 1]))
    np.save(tmp_path / "objects.npy", np.array([{"a": 1}] * 8, dtype=object))
    (tmp_path / "noise.npy").write_bytes(struct.pack("<8q", *range(8)))
    for name in ("nan.npy", "objects.npy", "noise.npy"):
        assert lines_start(refused(*TOY, "--load", name), name)


def test_a_histogram_for_a_dense_model(refused: Refused) -> None:
    assert lines_start(refused("--model", "llama-3.1-8b", "--devices", "8", "--load", "zipf:1"), "--load: ")


@pytest.mark.parametrize(
    ("plan", "paths"),
    [
        ("tp=2,xp=3", ["--plan"]),
        ("tp=-2,pp=0,ep=1.5", ["--plan tp", "--plan pp", "--plan ep"]),
        ("tp=2,tp=4", ["--plan tp"]),
        ("tp", ["--plan"]),
        ("edp=2", ["--plan"]),
        ("tp=1e9", ["--plan tp"]),
        ("tp=9999999999999999999", ["--plan tp"]),
        ("sharding=zero4,recompute=selective:x+y,dispatcher=none,schedule=1b1f", ["--plan sharding"]),
        ("pp=2,stage_layers=2+3", ["--plan stage_layers"]),
        ("tp2-pp4-xx", ["--plan"]),
        ("__import__('os').getcwd()", ["--plan"]),
    ],
)
def test_plans_that_cannot_be_read(refused: Refused, plan: str, paths: list[str]) -> None:
    lines = refused(*ESTIMATE, "--plan", plan)
    assert [line.split(": ")[0] for line in lines][: len(paths)] == paths


def test_every_knob_of_a_plan_has_its_line(refused: Refused) -> None:
    lines = refused(*ESTIMATE, "--plan", "sharding=zero4,recompute=selective:x+y,dispatcher=none,schedule=1b1f")
    assert [line.split(": ")[0].split()[-1] for line in lines] == [
        "sharding",
        "recompute",
        "recompute",
        "dispatcher",
        "schedule",
    ]
    assert all("(legal: " in line for line in lines)


@pytest.mark.parametrize("value", ["tp=0", "tp=-1", "tp=x", "tp=", "tp", "edp=2", "xp=1", "sharding=zero9", "tp=1.0"])
def test_candidates_that_are_none(refused: Refused, value: str) -> None:
    (line,) = refused(*TOY, "--set", value)
    assert line.startswith("--set")


def test_every_fault_of_the_candidates_has_its_line(refused: Refused) -> None:
    lines = refused(*TOY, "--set", "tp=0,x", "--set", "xp=2", "--set", "ep")
    assert lines_start(
        lines, "--set tp: '0' is", "--set tp: 'x' is", "--set: unknown axis 'xp'", "--set ep: has no value"
    )


def test_an_axis_is_set_once(refused: Refused) -> None:
    assert lines_start(refused(*TOY, "--set", "tp=1", "--set", "tp=2"), "--set tp: is given twice")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--devices", "0"),
        ("--devices", "-8"),
        ("--global-batch", "0"),
        ("--seq-len", "1.5"),
        ("--top", "0"),
        ("--top", "1000000"),
        ("--memory-limit-gib", "nan"),
        ("--reserve-gib", "80"),
        ("--precision", "fp4"),
        ("--target", "nothing"),
        ("--load", "zipf:-1"),
        ("--load", "uniform"),
        ("--load", ""),
        ("--nonsense", "1"),
    ],
)
def test_flags_out_of_range(refused: Refused, flag: str, value: str) -> None:
    (line,) = refused(*(TOY[:2] if flag == "--devices" else TOY), f"{flag}={value}")
    assert line.startswith(flag)


def test_every_file_and_flag_that_is_bad_is_named_at_once(refused: Refused, tmp_path: Path) -> None:
    """Model, cluster, software, job and candidates; what hangs on a bad cluster (does it have mxfp8?) is left."""
    (tmp_path / "m.yaml").write_text("name: m\nhidden_size: -3\n")
    (tmp_path / "c.yaml").write_text("name: c\ndevice: 5\n")
    files = ["--model", "m.yaml", "--cluster", "c.yaml", "--software", "nope", "--load", "none.yaml"]
    lines = refused(*files, "--devices", "8", "--target", "any", "--precision", "mxfp8", "--set", "ep=x")
    starts = ("m.yaml: hidden_size: is -3", "c.yaml: device: is a number", "nope: is neither", "--set ep: 'x'")
    assert all(any(start in line for line in lines) for start in starts), lines
    assert not any("--precision" in line or "--load" in line for line in lines)
    job = search_faults(model="m.yaml", cluster="c.yaml", devices=0, seq_len=0, precision="mxfp8")
    assert [one for one in job if one.startswith("--")] == [
        "--devices: is 0 (legal: a whole number from 1 to 1048576)",
        "--seq-len: is 0 (legal: a whole number from 1 to 16777216)",
    ]


def search_faults(**arguments: Any) -> list[str]:
    """The lines of a search from Python that is refused."""
    with pytest.raises(SpecError) as caught:
        search(**arguments)
    return [str(fault) for fault in caught.value.faults]
