"""Docstrings describe their parameters in whole phrases, and words that nobody outside knows stay retired."""

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("traces", "planner", "sim", "executor", "experiments", "ropebridge")
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

FEWEST_WORDS = 3

# Private words of earlier versions, as parts of names and as words; house words in brackets.
RETIRED_IN_NAMES = re.compile(
    r"""
    skeleton | crossing | foreseen | scout | \bspell | talking | parcel | safekeep | carriage | companion | contest
    | hard_life | post_office | users_code | hand_over | handed_over | take_up | let_go | find_circle | last_words
    | fault_hand | keepers? (?!s?_?alive) | patience | drawn_run | shown_run | standing_bytes | kept_bytes | occupancy
    | pace_s\b | pass_s\b | never_s\b | row_log | sync_lane
    """,
    re.VERBOSE | re.IGNORECASE,
)
RETIRED_IN_PROSE = re.compile(
    r"""
    \b(?: skeletons? | crossings? | sway(?:s|ed|ing)? | foreseen | scout(?:s|ed|ing)? | spells? | parcels?
    | safekeeping | keepers? | last\ words | blows? | fault\ hand | companions? | contests? | hard\ life
    | post\ office | handed?\ over | hands\ over | taken\ up | takes\ up(?!\ to) | let\ go | lets\ go | row\ logs?
    | what\ stands\ of | who\ watches )\b
    """,
    re.VERBOSE | re.IGNORECASE,
)


def sections(docstring: str) -> Iterator[tuple[str, str]]:
    """Each documented parameter or attribute of a docstring in Google's style, with its description."""
    inside, indent, name, text = False, 0, "", ""
    for line in [*docstring.splitlines(), "end"]:
        depth = len(line) - len(line.lstrip())
        if inside and line.strip() and depth <= indent and name:
            yield name, text
            name, text = "", ""
        if re.fullmatch(r"\s*(Args|Attributes):", line):
            inside, indent, name = True, depth, ""
        elif inside and line.strip() and depth <= indent:
            inside = False
        elif inside and (entry := re.fullmatch(rf"\s{{{indent + 4}}}(\*{{0,2}}\w+): (.*)", line)):
            if name:
                yield name, text
            name, text = entry[1], entry[2]
        elif name:
            text += " " + line.strip()


def fragments(path: Path) -> Iterator[str]:
    """Descriptions of parameters that are no phrase of a few words."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for name, text in sections(ast.get_docstring(node) or ""):
            first = re.split(r"[.;:](?:\s|$)", text, maxsplit=1)[0]
            if len(re.findall(r"[\w'`-]+", first)) < FEWEST_WORDS or re.match(
                r"(Of|In|As|From|Its|Until|For) \w+[.;]", text
            ):
                yield f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}: {name}: {text}"


def retired_words(path: Path) -> Iterator[str]:
    """Retired words among the names, comments and texts of a module."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            pattern = RETIRED_IN_NAMES if token.type == tokenize.NAME else RETIRED_IN_PROSE
            if token.type in (tokenize.NAME, tokenize.COMMENT, tokenize.STRING) and (
                found := pattern.search(token.string)
            ):
                yield f"{path.relative_to(ROOT)}:{token.start[0]}: {found[0]}"


def test_parameters_are_described_in_phrases() -> None:
    assert not [each for path in FILES for each in fragments(path)]


def test_retired_words_stay_retired() -> None:
    assert not [each for path in FILES for each in retired_words(path)]
    pages = {path.relative_to(ROOT): RETIRED_IN_PROSE.search(path.read_text()) for path in PAGES if path.exists()}
    assert not {str(path): found[0] for path, found in pages.items() if found}


if __name__ == "__main__":
    for path in FILES:
        print(*fragments(path), *retired_words(path), sep="\n", end="")
