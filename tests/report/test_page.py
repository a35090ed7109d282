"""The page as a reader's browser meets it: one file, honest sentences, every name escaped."""

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from longspec import jsonl
from longspec.artefact import write_json
from tests.report.synthetic_run import SETTINGS, write_run
from tests.report.test_numbers import report, write_tiny

VARIANTS = {"base": -0.02, "sinkpi-slicing": 0.0}


class Resources(HTMLParser):
    """Collects all that a page could load or link, and its visible text."""

    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.tags: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "data", "action", "poster", "background"):
                self.references.append(value or "")
            elif value and "url(" in value:
                self.references += re.findall(r"url\(([^)]*)\)", value)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read_page(folder: Path) -> tuple[Resources, str, str]:
    """The parsed page, its source, and its text with single spaces."""
    source = (folder / "report.html").read_text()
    parser = Resources()
    parser.feed(source)
    return parser, source, " ".join(" ".join(parser.text).split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run of two variants, reported."""
    path = tmp_path_factory.mktemp("run")
    report(write_run(path, VARIANTS))
    return path


def test_the_page_loads_nothing(folder: Path) -> None:
    parser, source, _ = read_page(folder)
    assert parser.references
    assert all(reference.startswith("#") for reference in parser.references)
    assert not parser.tags & {"script", "link", "img", "iframe", "object", "embed", "base"}
    assert "@import" not in source
    assert not re.search(r"https?:", source)


def test_every_reference_within_the_page_has_one_target(folder: Path) -> None:
    """Figures share one document: a clip path or marker of one must not be taken for another's."""
    parser, source, _ = read_page(folder)
    ids = re.findall(r'\bid="([^"]*)"', source)
    assert {reference[1:] for reference in parser.references} <= set(ids)
    assert len(ids) == len(set(ids))


def test_figures_take_their_colours_from_the_page(folder: Path) -> None:
    """A colour that a figure states itself would vanish in one of the two schemes."""
    figures = re.findall(r"<svg.*?</svg>", read_page(folder)[1], flags=re.DOTALL)
    assert len(figures) == 1 + 3 * len(VARIANTS)
    variables = set(re.findall(r"var\(--([\w-]+)\)", "".join(figures)))
    assert variables <= set(re.findall(r"--([\w-]+):", read_page(folder)[1]))
    assert not [colour for figure in figures for colour in re.findall(r"(?:fill|stroke): (#\w+)", figure)]


def test_the_headline_tells_both_variants(folder: Path) -> None:
    text = read_page(folder)[2]
    for variant in VARIANTS:
        assert f"{variant}, final draft (after longcot)" in text
    assert "0 mismatches" in text
    assert "3 of 3 stages improve on the one before on their own kind of data." in text
    assert "Speculative decoding is slower than plain decoding here" in text


def test_what_became_of_the_records_is_told(folder: Path) -> None:
    text = read_page(folder)[2]
    for dataset, read, train in (("stdlib", "1,640", "1,555"), ("puzzles", "4,000", "3,797")):
        assert f"{dataset} {read} — {train}" in text
        assert f"{dataset} rejected 1 text: holds <NUL> inputs/{dataset}.jsonl, 7" in text
        assert f"{dataset} read, though unusual 12 the line ends in CRLF" in text
        assert f"{dataset} aligned 2 align[0].filter: records filtered out" in text


def test_names_are_escaped(tmp_path: Path) -> None:
    """Angle brackets, ampersands and dollars in the names of variant, task, model and provenance stay what they are."""
    name = "<i>a&b</i> $x_1$"
    task = "<u>t</u>"
    short = SETTINGS["tasks"]["short"]
    arguments = write_run(tmp_path, {"base": 0.0}, SETTINGS | {"tasks": {"short": short}}, model="<b>m")
    folder = tmp_path / "results" / "base"
    for path in (folder / "evaluation").iterdir():
        jsonl.write(path, [row | {"task": task} for row in list(jsonl.read(path))])
    arguments[arguments.index("--variant") + 1] = f"{name}={folder}"
    arguments[arguments.index("--settings") + 1] = json.dumps(SETTINGS | {"tasks": {task: short}})
    provenance = {"stages": {"base": {}, "long": {}, "longcot": {}}, "<s>key": "<script>alert(1)</script>"}
    write_json(folder / "final_draft" / "provenance.json", provenance)
    report(arguments)
    parser, source, text = read_page(tmp_path)
    assert not parser.tags & {"u", "s", "script"}
    assert html.escape(name) in source
    assert name in text
    assert "<b>m" in text
    assert "<script>alert(1)</script>" in text


@pytest.mark.parametrize(
    ("changes", "sentences"),
    [
        (
            {"mismatches": 0, "near_ties": 0, "seconds_speculative": 6.0},
            ["250 tokens compared with plain greedy decoding, 0 mismatches.", "slower than plain decoding here (0.50×)"],
        ),
        (
            {"seconds_speculative": 1.0},
            ["25 mismatches, all proven near-ties of the target.", "3.00× as fast as plain decoding here"],
        ),
        ({"mismatches": 2, "seconds_speculative": 3.0}, ["Not lossless", "50 mismatches, 25 proven", "no clear gain here"]),
        ({"near_ties": 0}, ["Not lossless", "25 mismatches, none proven near-ties."]),
        ({"tokens_compared": 0, "mismatches": 0, "near_ties": 0}, ["Losslessness was not checked"]),
    ],
)
def test_the_sentences_follow_the_numbers(tmp_path: Path, changes: dict[str, float], sentences: list[str]) -> None:
    report(write_tiny(tmp_path, **changes))
    text = read_page(tmp_path)[2]
    assert all(sentence in text for sentence in sentences)
    assert ("Not lossless" in text) == ("Not lossless" in sentences)


def test_steps_without_a_loss_are_counted(tmp_path: Path) -> None:
    arguments = write_tiny(tmp_path)
    path = tmp_path / "results" / "base" / "long" / "metrics.jsonl"
    rows = list(jsonl.read(path))
    rows[3]["loss"] = None
    jsonl.write(path, rows)
    report(arguments)
    assert "Steps without a finite loss, left out: base, long: 1." in read_page(tmp_path)[2]
