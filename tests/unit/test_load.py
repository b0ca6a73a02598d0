"""Histograms of routed tokens: every form read, every fault one line with its path."""

import io
import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from ap_search.cost.imbalance import worst_rank_ratio
from ap_search.errors import SpecError
from ap_search.spec import load as load_module
from ap_search.spec.job import Load
from ap_search.spec.load import load_load


def read(text: str | Path, *, num_experts: int = 4, num_moe_layers: int = 2) -> Load:
    return load_load(text, num_experts=num_experts, num_moe_layers=num_moe_layers)


def shares(text: str | Path, **sizes: int) -> list[list[float]]:
    found = read(text, **sizes).shares
    assert found is not None
    return found.tolist()


def faults(text: str | Path, **sizes: int) -> list[str]:
    with pytest.raises(SpecError) as caught:
        read(text, **sizes)
    lines = [str(fault) for fault in caught.value.faults]
    assert all("\n" not in line for line in lines)
    return lines


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def npy(values: object, dtype: object = None) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array(values, dtype=dtype), allow_pickle=True)
    return buffer.getvalue()


# --- words ---


def test_balanced_has_no_shares() -> None:
    assert (read("balanced").name, read("balanced").shares) == ("balanced", None)


def test_zipf_falls_with_the_power_of_the_rank() -> None:
    """1/1, 1/2, 1/3, 1/4 over their sum 25/12: 12/25, 6/25, 4/25, 3/25."""
    assert shares("zipf:1") == [pytest.approx([0.48, 0.24, 0.16, 0.12])]


def test_zipf_of_zero_is_balanced() -> None:
    assert shares("zipf:0") == [[0.25] * 4]
    assert read("zipf:0").name == "zipf:0"


def test_steep_zipf_puts_all_on_the_first_expert() -> None:
    assert shares("zipf:1e300") == [[1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("text", ["zipf:", "zipf:-1", "zipf:nan", "zipf:inf", "zipf:x", "zipf:1,2"])
def test_zipf_needs_a_finite_exponent(text: str) -> None:
    (line,) = faults(text)
    assert line.startswith("--load: ")
    assert "zipf:A" in line


@pytest.mark.parametrize("text", ["", "zipf", "Balanced", "nowhere.yaml", "a\0b", "x" * 5000])
def test_what_is_neither_word_nor_file_names_the_forms(text: str) -> None:
    (line,) = faults(text)
    assert line.startswith("--load: there is no file")
    assert "balanced, zipf:A" in line


@pytest.mark.parametrize("value", [3, True, None, [1, 2, 3, 4]])
def test_other_types_are_refused(value: object) -> None:
    (line,) = faults(value)  # type: ignore[arg-type]
    assert line.startswith("--load: is ")


def test_a_dense_model_takes_balanced_only(tmp_path: Path) -> None:
    assert load_load("balanced", num_experts=0, num_moe_layers=0).shares is None
    for text in ("zipf:1", str(write(tmp_path, "load.yaml", "[1, 2]"))):
        (line,) = faults(text, num_experts=0, num_moe_layers=0)
        assert "no routed experts (legal: balanced)" in line


# --- files ---

ONE_ROW = [[0.1, 0.2, 0.3, 0.4]]
TWO_ROWS = [[0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.yaml", "[10, 20, 30, 40]"),
        ("a.yml", "- 10\n- 20\n- 30\n- 40\n"),
        ("a.yaml", "tokens_per_expert: [0.1, 0.2, 0.3, 0.4]\nsource: step 1200 of a run\n"),
        ("a.json", "[[10, 20, 30, 40]]"),
        ("a.json", '{"tokens_per_expert": [1, 2, 3, 4]}'),
        ("a.csv", "10,20,30,40\n"),
        ("a.csv", "# step 1200\n\n10, 20, 30, 40\n"),
        ("a.csv", "1.0e1 2.0e1 3.0e1 4.0e1\n"),
        ("a.csv", "10\n20\n30\n40\n"),
        ("a.CSV", "\ufeff10,20,30,40"),
        ("a.npy", npy([10, 20, 30, 40])),
        ("a.npy", npy([[1, 2, 3, 4]], np.float32)),
        ("a.npy", npy([10, 20, 30, 40], ">u2")),
        # Source ranks sent 1 2 3 4 and 0 0 0 0.
        ("a.yaml", "source_expert_loads: [[1, 2, 3, 4], [0, 0, 0, 0]]"),
        # Source ranks sent 1 0 3 0 and 0 2 0 4.
        ("a.npy", npy([[[1, 0, 3, 0], [0, 2, 0, 4]]])),
    ],
)
def test_one_row_per_expert(tmp_path: Path, name: str, content: str | bytes) -> None:
    found = read(write(tmp_path, name, content))
    assert found.name == name
    assert found.shares is not None
    assert found.shares.tolist() == [pytest.approx(row) for row in ONE_ROW]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.yaml", "- [10, 20, 30, 40]\n- [5, 5, 5, 5]\n"),
        ("a.yaml", "tokens_per_expert:\n- [10, 20, 30, 40]\n- [5, 5, 5, 5]\nlayers: [3, 4]\n"),
        ("a.json", "[[1, 2, 3, 4], [7, 7, 7, 7]]"),
        ("a.csv", "10,20,30,40\n7,7,7,7\n"),
        ("a.npy", npy([[10, 20, 30, 40], [5, 5, 5, 5]])),
        # Layer 0: 1 2 0 0 + 0 0 3 4; layer 1: 5 5 0 0 + 0 0 5 5.
        ("a.json", '{"source_expert_loads": [[[1, 2, 0, 0], [0, 0, 3, 4]], [[5, 5, 0, 0], [0, 0, 5, 5]]]}'),
    ],
)
def test_a_row_per_layer(tmp_path: Path, name: str, content: str | bytes) -> None:
    assert shares(write(tmp_path, name, content)) == [pytest.approx(row) for row in TWO_ROWS]


def test_loads_per_source_rank_are_kept_beside_their_sum(tmp_path: Path) -> None:
    """Rank 0 sends 1 + 2 of 10 copies, rank 1 sends 3 + 4: shares of all 10; the second layer 5 5 and 5 5 of 20."""
    counts = [[[1, 2, 0, 0], [0, 0, 3, 4]], [[5, 5, 0, 0], [0, 0, 5, 5]]]
    for name, content in (("a.json", json.dumps({"source_expert_loads": counts})), ("a.npy", npy(counts))):
        found = read(write(tmp_path, name, content))
        assert found.source_shares is not None
        assert found.source_shares.shape == (2, 2, 4)
        assert found.source_shares[0].ravel().tolist() == pytest.approx([0.1, 0.2, 0, 0, 0, 0, 0.3, 0.4])
        assert found.source_shares.sum(axis=2)[1].tolist() == [0.5, 0.5]
        assert found.source_shares.sum(axis=1).ravel().tolist() == pytest.approx(np.ravel(found.shares).tolist())
        with pytest.raises(ValueError, match="read-only"):
            found.source_shares[0, 0, 0] = 1.0


def test_sums_alone_have_no_source_ranks(tmp_path: Path) -> None:
    assert read(write(tmp_path, "a.json", "[1, 2, 3, 4]")).source_shares is None
    assert read("zipf:1").source_shares is None


def test_a_path_may_be_text(tmp_path: Path) -> None:
    assert read(str(write(tmp_path, "a.yaml", "[1, 1, 1, 1]"))).shares is not None


def test_equal_counts_are_exactly_balanced(tmp_path: Path) -> None:
    """A uniform histogram must price as `balanced` to the last bit: shares are equal and the worst rank has ratio 1."""
    for count, experts in ((7, 6), (1e300, 160), (3e-320, 60)):
        found = read(write(tmp_path, "a.json", json.dumps([count] * experts)), num_experts=experts)
        assert found.shares is not None
        assert len(set(found.shares[0].tolist())) == 1
        for ep in (size for size in range(1, experts + 1) if experts % size == 0):
            assert worst_rank_ratio(found.shares, ep).tolist() == [1.0]


def test_shares_cannot_be_written(tmp_path: Path) -> None:
    for text in ("zipf:1", str(write(tmp_path, "a.json", "[1, 2, 3, 4]"))):
        found = read(text).shares
        assert found is not None
        with pytest.raises(ValueError, match="read-only"):
            found[0, 0] = 1.0


# --- faults ---


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("a.yaml", "[1, 2, 3]", "a.yaml: has 3 numbers (legal: 4, one per expert)"),
        ("a.yaml", "tokens_per_expert: []", "a.yaml: tokens_per_expert: has 0 numbers (legal: 4, one per expert)"),
        ("a.csv", "1,2,3,4\n1,2\n", "a.csv: line 2: has 2 numbers (legal: 4, one per expert)"),
        (
            "a.json",
            "[[1,2,3,4],[1,2,3,4],[1,2,3,4]]",
            "a.json: has 3 rows (legal: one row of 4 numbers, or 2 rows, one per MoE layer)",
        ),
        ("a.npy", npy([1, 2, 3]), "a.npy: has the shape (3,) (legal: (4,), (2, 4), or (2, source ranks, 4))"),
        (
            "a.npy",
            npy([[[1, 2, 3, 4]]] * 3),
            "a.npy: has the shape (3, 1, 4) (legal: (4,), (2, 4), or (2, source ranks, 4))",
        ),
        (
            "a.npy",
            npy([[[1, 2, 3, 4], [0, 0, 0, -1]]]),
            "a.npy: [0][1], expert 3: is -1 (legal: a finite number of at least 0)",
        ),
        (
            "a.yaml",
            "source_expert_loads: [[[1, 2, 3, 4]], [[1, 2, 3, 4], [4, 3, 2, 1]]]",
            "a.yaml: source_expert_loads[1]: has 2 source ranks (legal: 1, as the first layer)",
        ),
        ("a.yaml", "[1, .nan, 3, 4]", "a.yaml, expert 1: is nan (legal: a finite number of at least 0)"),
        ("a.json", "[1, 2, Infinity, 4]", "a.json, expert 2: is inf (legal: a finite number of at least 0)"),
        ("a.csv", "1,2,3,nan", "a.csv: line 1, expert 3: is nan (legal: a finite number of at least 0)"),
        ("a.npy", npy([1, 2, 3, np.inf]), "a.npy: [0], expert 3: is inf (legal: a finite number of at least 0)"),
        ("a.yaml", "[1, -2, 3, 4]", "a.yaml, expert 1: is -2 (legal: a finite number of at least 0)"),
        ("a.yaml", "[0, 0, 0, 0]", "a.yaml: is all zero (legal: at least one expert with tokens)"),
        ("a.yaml", "[1, two, 3, 4]", "a.yaml, expert 1: is text ('two') (legal: a number of at least 0)"),
        ("a.yaml", "[1, true, 3, 4]", "a.yaml, expert 1: is a true/false value (True) (legal: a number of at least 0)"),
        (
            "a.yaml",
            "[1, [2, 3, 4, 5], 6]",
            "a.yaml: has 3 rows (legal: one row of 4 numbers, or 2 rows, one per MoE layer)",
        ),
        ("a.yaml", "[1, [2, 3, 4, 5]]", "a.yaml: [0]: has 1 number (legal: 4, one per expert)"),
        ("a.csv", "expert,tokens\n", "a.csv: line 1: has 2 numbers (legal: 4, one per expert)"),
        ("a.csv", "1,,3,4\n", "a.csv: line 1, expert 1: is text ('') (legal: a number of at least 0)"),
        ("a.csv", "# nothing\n", "a.csv: has no numbers"),
        ("a.yaml", "hello", "a.yaml: is text ('hello') (legal: a list, or a mapping with the key tokens_per_expert)"),
        ("a.yaml", "layers: [1]", "a.yaml: needs one of two keys (legal: tokens_per_expert or source_expert_loads)"),
        ("a.yaml", "tokens: [1]", "a.yaml: tokens: is not a known key (legal: tokens_per_expert)"),
        (
            "a.yaml",
            "tokens_per_expert: [1, 2, 3, 4]\nlayers: [1, 2]",
            "a.yaml: layers: names 2 layers (legal: one per row, 1)",
        ),
        (
            "a.yaml",
            "source_expert_loads: [[1, 2, 3, 4], [1, 2]]",
            "a.yaml: source_expert_loads[1]: has 2 numbers (legal: 4, one per expert)",
        ),
        ("a.npy", npy([1, 2, 3, 4], np.complex64), "a.npy: holds complex64 (legal: an array of integers or floats)"),
        ("a.npy", npy([True] * 4), "a.npy: holds bool (legal: an array of integers or floats)"),
    ],
)
def test_faults_name_their_place(tmp_path: Path, name: str, content: str | bytes, wanted: str) -> None:
    assert faults(write(tmp_path, name, content)) == [wanted]


def test_every_faulty_row_is_named(tmp_path: Path) -> None:
    lines = faults(write(tmp_path, "a.json", "[[1, 2, 3, -4], [1, 2, 3]]"))
    assert lines == [
        "a.json: [0], expert 3: is -4 (legal: a finite number of at least 0)",
        "a.json: [1]: has 3 numbers (legal: 4, one per expert)",
    ]


def test_many_faulty_rows_are_cut(tmp_path: Path) -> None:
    lines = faults(write(tmp_path, "a.json", json.dumps([[-1, 0, 0, 1]] * 50)), num_moe_layers=50)
    assert len(lines) == 21
    assert lines[-1] == "a.json: [20], expert 0: and 29 more rows alike"


def test_numbers_beyond_floats_are_refused(tmp_path: Path) -> None:
    (line,) = faults(write(tmp_path, "a.json", f"[1, 2, 3, {'9' * 400}]"))
    assert line.startswith("a.json, expert 3: is 999")


def test_sums_beyond_floats_are_refused(tmp_path: Path) -> None:
    """Each number is legal, the sum of the source ranks is not."""
    (line,) = faults(write(tmp_path, "a.json", '{"source_expert_loads": [[1e308, 1, 1, 1], [1e308, 1, 1, 1]]}'))
    assert line == "a.json: source_expert_loads, expert 0: is inf (legal: a finite number of at least 0)"


@pytest.mark.parametrize("name", ["a.yaml", "a.json", "a.csv"])
def test_files_that_are_no_text(tmp_path: Path, name: str) -> None:
    assert "is empty" in faults(write(tmp_path, name, ""))[0]
    assert "is not UTF-8 text" in faults(write(tmp_path, name, b"\xff\xfe\x00"))[0]


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert "is a folder" in faults(tmp_path)[0]


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.npy"])
def test_files_over_the_limit_are_not_read(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "MAX_HISTOGRAM_BYTES", 2**20)
    (line,) = faults(write(tmp_path, name, b"1" * (2**20 + 1)))
    assert line.endswith("is 1.0 MiB (legal: files up to 1 MiB)")


def test_yaml_over_the_readers_limit_is_not_read(tmp_path: Path) -> None:
    (line,) = faults(write(tmp_path, "a.yaml", b"# " + b"x" * 2**23))
    assert line.endswith("is 8.0 MiB (legal: files up to 4 MiB)")


class _Bomb:
    """Would touch a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return (Path.touch, (self.path,))


def test_pickled_objects_are_refused_unread(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    buffer = io.BytesIO()
    np.save(buffer, np.array([_Bomb(touched)] * 4, dtype=object), allow_pickle=True)
    for content in (buffer.getvalue(), pickle.dumps(_Bomb(touched))):
        (line,) = faults(write(tmp_path, "a.npy", content))
        assert line.startswith("a.npy: is not an NPY file of numbers")
    assert not touched.exists()


def test_npy_headers_that_promise_too_much_are_refused(tmp_path: Path) -> None:
    """The header says 2^40 numbers, the file holds 4."""
    honest = npy(np.arange(4, dtype=np.float64))
    header = honest[:128].replace(b"(4,), }".ljust(40), b"(1099511627776,), }".ljust(40))
    assert header != honest[:128]
    assert len(header) == 128
    for content in (header + honest[128:], honest[:100], b"", honest.replace(b"NUMPY", b"NUMPX")):
        (line,) = faults(write(tmp_path, "a.npy", content))
        assert line.startswith("a.npy: is not an NPY file of numbers")


def test_archives_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", np.arange(4))
    (line,) = faults((tmp_path / "a.npz").rename(tmp_path / "a.npy"))
    assert line.startswith("a.npy: is not an NPY file of numbers")


def test_expressions_are_never_run(tmp_path: Path) -> None:
    (line,) = faults(write(tmp_path, "a.yaml", "[1, 2, 3, __import__('os').getpid()]"))
    assert "a.yaml" in line


# --- imbalance of ranks ---


def test_the_worst_rank_over_the_mean() -> None:
    """Shares 0.5 0.3 0.1 0.1: ep 2 holds 0.8 and 0.2, mean 0.5, so 1.6; ep 4 holds 0.5 at a mean of 0.25, so 2."""
    table = np.array([[0.5, 0.3, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]])
    assert worst_rank_ratio(table, 1).tolist() == [1.0, 1.0]
    assert worst_rank_ratio(table, 2).tolist() == pytest.approx([1.6, 1.0])
    assert worst_rank_ratio(table, 4).tolist() == [2.0, 1.0]


def test_balanced_ranks_of_unbalanced_experts_cost_nothing() -> None:
    assert worst_rank_ratio(np.array([[0.1, 0.4, 0.4, 0.1]]), 2).tolist() == [1.0]


def test_an_ep_that_does_not_divide_is_cut_at_whole_experts() -> None:
    """5 experts on 2 ranks: 2 and 3 experts, 0.4 and 0.6 of the load, so 0.6 / 0.5."""
    assert worst_rank_ratio(np.full((1, 5), 0.2), 2).tolist() == pytest.approx([1.2])
