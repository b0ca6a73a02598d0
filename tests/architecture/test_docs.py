"""Documents: a page for each kernel, links that lead somewhere, a README whose first commands stand alone."""

import re
from pathlib import Path

import pytest

from ap_search.version import __version__
from tests.architecture.source import ROOT, modules_of, report

PAGES = sorted((ROOT / "docs").rglob("*.md"))
MODEL_PAGES = sorted((ROOT / "docs" / "cost-model").glob("*.md"))
README = ROOT / "README.md"

# Modules of cost/ that put prices together and have no formula of their own.
ASSEMBLY = {
    "__init__",
    "alternatives",
    "blocks",
    "context",
    "details",
    "group",
    "parts",
    "prepared",
    "rows",
    "shapes",
    "stages",
    "step",
}

# Put together here, so that this file does not hold what it looks for.
STRANGE = (
    "/" + "work/",
    "/" + "tmp/bash",
    "farm" + "-",
    "pypi" + ".org",
    "files.python" + "hosted",
    "proxy" + ".golang",
    "issues " + "show",
    "domain" + ".md",
)
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".txt", ".cfg", ".csv", ""}


def _links(text: str) -> list[str]:
    """Targets of links that stay in the repository, code blocks left out."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"`[^`\n]*`", "", prose)
    targets = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose)
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def _anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def _code_of(page: Path) -> set[str]:
    """Modules that a page of the cost model says it documents."""
    line = re.search(r"^Code: (.*?)\n\n", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return set(re.findall(r"`ap_search/cost/(\w+)\.py`", line[1])) if line else set()


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links name files that exist, and headings that these files have."""
    faults = []
    for target in _links(page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            faults.append(f"{target}: no such file")
        elif anchor and anchor not in _anchors(file.read_text(encoding="utf-8")):
            faults.append(f"{target}: no such heading")
    assert not faults, report(faults)


def test_every_page_is_linked_from_the_index() -> None:
    """docs/index.md leads to each page."""
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in _links(index.read_text("utf-8"))}
    assert not [page for page in PAGES if page != index and page not in linked]


def test_every_kernel_has_a_page() -> None:
    """Each module of cost/ with a formula is named by one page, and pages name modules that exist."""
    kernels = {Path(module.path).stem for module in modules_of("cost")} - ASSEMBLY
    named = [name for page in MODEL_PAGES for name in _code_of(page)]
    assert kernels - set(named) == set()
    assert set(named) - kernels - ASSEMBLY == set()
    assert sorted(named) == sorted(set(named)), "two pages document one module"


@pytest.mark.parametrize("page", MODEL_PAGES, ids=lambda page: page.stem)
def test_pages_of_the_cost_model_have_their_parts(page: Path) -> None:
    """Code, assumptions, sources."""
    text = page.read_text(encoding="utf-8")
    assert _code_of(page)
    assert re.search(r"^#+ Assumptions", text, re.MULTILINE)
    assert re.search(r"^#+ Sources?", text, re.MULTILINE) or re.search(r"^Sources?: ", text, re.MULTILINE)


def test_pages_that_the_code_names_exist() -> None:
    """Docstrings point to docs/cost-model/ and docs/guides/."""
    faults = []
    for module in modules_of("cost", "plan", "search", "spec", "result", "report", "api", "cli"):
        for path in re.findall(r"\bdocs/(?:cost-model|guides)/[\w-]+\.md", module.text):
            faults += [] if (ROOT / path).is_file() else [f"{module.path}: {path}"]
    assert not faults, report(faults)


def _blocks() -> list[str]:
    """The README's `sh` blocks."""
    return re.findall(r"^```sh\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("number", "does"), [(0, "ap-search --model "), (1, "-m pytest")])
def test_first_commands_of_the_readme_stand_alone(number: int, does: str) -> None:
    """One line each, from making an environment to the job."""
    command = _blocks()[number]
    assert command.count("\n") == 1
    assert re.search(r"python3 -m venv (\S+) && \1/bin/pip install .*&& \1/bin/", command)
    assert does in command


def test_the_changelog_knows_the_version() -> None:
    """A version has its entry."""
    changelog = (ROOT / "docs" / "changelog.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(__version__)}\b", changelog, re.MULTILINE)


def test_no_file_names_the_place_it_was_written_in() -> None:
    """No machine's paths, no package registries."""
    faults = []
    for file in _tracked():
        text = file.read_text(encoding="utf-8", errors="replace")
        faults += [f"{file.relative_to(ROOT)}: {word}" for word in STRANGE if word in text]
    assert not faults, report(faults)


def _tracked() -> list[Path]:
    """Text files of the checkout: build products and caches, which begin with a dot or are ignored, left out."""
    shown = (".ci", ".github", ".gitignore")
    built = ("__pycache__", "build", "dist")
    found = []
    for file in ROOT.rglob("*"):
        parts = file.relative_to(ROOT).parts
        hidden = any(part.startswith(".") and part not in shown for part in parts)
        product = any(part in built or part.endswith(".egg-info") for part in parts)
        if file.is_file() and not hidden and not product and file.suffix in TEXT:
            found.append(file)
    return found
