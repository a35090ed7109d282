"""The page as a reader's browser meets it: one file, honest sentences, every name escaped."""

import html
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from longspec.atomic_files import write_json
from tests.report.synthetic_run import STAGES, write_run
from tests.report.test_numbers import report, write_tiny

pytestmark = pytest.mark.slow  # half a minute and more as a whole

VOID = {"meta", "br", "hr", "img", "input", "link", "col", "source", "wbr"}
NAME = "<u>a&b</u> $x_1$"
VARIANTS = {"base": -0.02, NAME: 0.0}


class Resources(HTMLParser):
    """Collects all that a page could load or link, and its visible text."""

    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.tags: set[str] = set()
        self.text: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []  # each a list of rows of cells
        self.open: list[str] = []
        self.faults: list[str] = []  # tags that do not close what was opened last

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "data", "action", "poster", "background"):
                self.references.append(value or "")
            elif value and "url(" in value:
                self.references += re.findall(r"url\(([^)]*)\)", value)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID and (not self.open or self.open.pop() != tag):
            self.faults.append(f"line {self.getpos()[0]}: </{tag}>")

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if {"th", "td"} & set(self.open):
            cell = self.tables[-1][-1]
            cell[-1] = f"{cell[-1]} {data}".strip()

    def rows(self, *head: str) -> list[list[str]]:
        """The rows, in words, of the table whose first row begins with these cells."""
        (found,) = [
            table for table in self.tables if [cell.split()[:1] for cell in table[0][: len(head)]] == [[name] for name in head]
        ]
        return [[" ".join(cell.split()) for cell in row] for row in found[1:]]


def read_page(folder: Path, name: str = "report.html") -> tuple[Resources, str, str]:
    """The parsed page, its source, and its text with single spaces."""
    source = (folder / name).read_text()
    parser = Resources()
    parser.feed(source)
    return parser, source, " ".join(" ".join(parser.text).split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run of two variants, reported: names with angle brackets, ampersands and dollars, and with hidden characters."""
    path = tmp_path_factory.mktemp("run")
    arguments = write_run(path, VARIANTS, model="<b>m")
    provenance = {"order": STAGES, "<s>key": "<script>alert(1)</script>", "by \u202egpj": "a\x1b[31mb\u200bc"}
    write_json(path / "results" / NAME / "final_draft/provenance.json", provenance)
    report(arguments)
    return path


def test_the_page_is_one_well_formed_document(folder: Path) -> None:
    """It loads nothing; elements close in order; what is folded opens without a script; figures share no clip path."""
    parser, source, text = read_page(folder)
    ids = re.findall(r'\bid="([^"]*)"', source)
    assert {reference[1:] for reference in parser.references} <= set(ids)
    assert len(ids) == len(set(ids))
    assert all(reference.startswith("#") for reference in parser.references)
    assert not parser.tags & {"script", "link", "img", "iframe", "object", "embed", "base"}
    assert not re.search(r"https?:|@import", source)
    assert (parser.faults, parser.open) == ([], [])
    assert source.startswith("<!doctype html>")
    assert not [name for _, attributes in parser.elements for name in attributes if name.startswith("on") or name == "hidden"]
    assert source.count("<summary>") == source.count("<details")
    assert "3 of 3 measured steps from one stage to the next improve on the later one's own kind of data." in text


def test_names_are_escaped(folder: Path) -> None:
    """What turns or hides text stands as signs."""
    parser, source, text = read_page(folder)
    assert not parser.tags & {"u", "s", "script"}
    assert html.escape(NAME) in source
    assert all(name in text for name in (f"{NAME}, final draft (after longcot)", "<b>m", "<script>alert(1)</script>"))
    assert "by <U+202E>gpj a␛[31mb<U+200B>c" in text


def test_the_tables_hold_the_figures_of_lines_made_by_hand_and_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    """The tiny run: 8 rounds of 2 drafted tokens; 3 s plain and 2 s speculative for each of ten prompts."""
    arguments, made = write_tiny(tmp_path), []
    for _ in range(2):
        report(arguments)
        made.append([(tmp_path / name).read_bytes() for name in ("report.json", "report.html")])
    assert made[0] == made[1]
    parser, _, text = read_page(tmp_path)
    rows = {row[0]: row[1:] for row in parser.rows("Drafter", "short", "all")}
    names = ("untrained draft", "prompt lookup", "base", "long", "longcot")
    assert [rows[name][0].split()[0] for name in names] == ["1.00", "1.12", "2.00", "1.88", "2.38"]
    assert rows["untrained draft"] == ["1.00 1.00 – 1.00"] * 2
    assert parser.rows("Stage", "against") == [
        ["base", "untrained draft", "short (stdlib)", "1.00", "2.00", "+1.000 +1.000 to +1.000", "yes"],
        ["long", "base", "no task uses stdlib-long", "—", "—", "—", "not measured"],
        ["longcot", "long", "no task uses puzzles", "—", "—", "—", "not measured"],
    ]
    speeds = {row[0]: row[1:] for row in parser.rows("Drafter", "speed-up")}
    shares = "draft 25.0 %, target 50.0 %, rest 25.0 %"
    assert speeds["longcot"] == ["1.50× 1.50 – 1.50", "30.0 s", "20.0 s", shares, "0.20", "0.79"]
    measured = {row[0]: row[1:] for row in parser.rows("Drafter", "task", "T")}
    assert measured["longcot"] == [
        "short", "0.0", "chain of 2", "0-1k", "10", "2.38", "0.88 0.57", "1.9", "1.3", "1.50", "25%", "100", "10 10"
    ]  # fmt: skip
    assert "n = 4" in text  # prompts of the buckets 0-256 and 256-512
    assert "No evaluation kept a sample" in text


def test_figures_take_their_colours_from_the_page(folder: Path) -> None:
    """A colour that a figure states itself would vanish in one of the two schemes."""
    figures = re.findall(r"<svg.*?</svg>", read_page(folder)[1], flags=re.DOTALL)
    assert len(figures) == 2 * len(VARIANTS)
    variables = set(re.findall(r"var\(--([\w-]+)\)", "".join(figures)))
    assert variables <= set(re.findall(r"--([\w-]+):", read_page(folder)[1]))
    assert not [colour for figure in figures for colour in re.findall(r"(?:fill|stroke): (#\w+)", figure)]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("changes", "sentences"),
    [
        (
            {"mismatches": 0, "near_ties": 0, "margin": None, "margin_allowed": None, "seconds_speculative": 6.0},
            ["500 tokens compared with plain greedy decoding, 0 mismatches.", "speed-up 0.50×: slower than plain decoding"],
        ),
        (
            {"seconds_speculative": 1.0},
            [
                "50 mismatches, all proven near-ties of the target, the widest at 50.0 % of the margin allowed.",
                "speed-up 3.00×.",
            ],
        ),
        ({"mismatches": 2, "seconds_speculative": 3.0}, ["Not lossless", "100 mismatches, 50 proven", ": no clear gain"]),
        (
            {"near_ties": 0, "margin": 0.1},
            ["Not lossless", "50 mismatches, none proven near-ties, the widest at 125.0 % of the margin allowed."],
        ),
        ({"tokens_compared": 0, "mismatches": 0, "near_ties": 0}, ["Losslessness was not checked"]),
    ],
)
def test_the_sentences_follow_the_numbers(tmp_path: Path, changes: dict[str, float], sentences: list[str]) -> None:
    report(write_tiny(tmp_path, **changes))
    text = read_page(tmp_path)[2]
    assert all(sentence in text for sentence in sentences)
    assert ("Not lossless" in text) == ("Not lossless" in sentences)
