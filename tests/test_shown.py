"""Signs in place of what a terminal would obey or nobody would see."""

import sys
import unicodedata

import pytest

from longspec import shown
from tests import refusals


def test_everyday_text_stays_as_it_is() -> None:
    text = "größer, naïve, 数学, العربية, हिन्दी, 🙂 ❤️ 👍🏽, “quotes” – x² ≤ 3 €, a\\nb \u00a0\u3000"
    assert shown.one_line(text) == text
    assert shown.lines(f"{text}\n\n{text}\n") == f"{text}\n\n{text}\n"


def test_every_control_and_format_character_becomes_a_sign_of_its_own() -> None:
    """By Unicode's own table: controls, surrogates, line ends, and format characters that are drawn as nothing."""
    drawn = {*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD, *range(0x13430, 0x13440)}
    for code in range(sys.maxunicode + 1):
        if unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs", "Zl", "Zp") and code not in drawn:
            sign = shown.one_line(chr(code))
            assert sign.isprintable(), hex(code)
            assert shown.lines(f"a{chr(code)}b") == ("a\nb" if code == 10 else f"a{sign}b")
    signs = {shown.one_line(chr(code)) for code in range(0xA0)}
    assert len(signs) == 0xA0
    assert (shown.one_line("a\x1b[31m\r\n\x7f\u202e\ud800"), shown.one_line(3)) == ("a␛[31m␍␊␡<U+202E><U+D800>", "3")


def test_the_wordings_of_all_errors_are_those_on_record() -> None:
    """Else look at the difference after `python -m tests.refusals`: each names a place and what to do."""
    assert refusals.wordings() == refusals.WORDINGS.read_text(encoding="utf-8")


def test_an_error_is_one_line_unless_it_says_that_it_has_many() -> None:
    assert shown.error(ValueError("a.jsonl\nerror: all is well\x1b[0m")) == "error: a.jsonl␊error: all is well␛[0m"
    many = shown.ManyLinesError("two faults:", "first\nsecond")
    assert shown.error(many) == "error: two faults:\nfirst␊second"
    assert str(many) == "two faults:\nfirst\nsecond"
    with pytest.raises(UnicodeDecodeError) as caught:
        b"\xff".decode()
    assert "invalid start byte" in shown.error(caught.value)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "-"), (59.6, "60 s"), (100, "2 min"), (5999, "1 h 40 min"), (7500, "2 h 05 min"), (190000, "2 d 4 h")],
)
def test_durations(seconds: float | None, words: str) -> None:
    assert shown.duration(seconds) == words


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (RuntimeError("[enforce fail at inline_container.cc] write failed: No space left on device"), "space there"),
        (OSError(122, "Disk quota exceeded", "a/b"), "space there"),
        (PermissionError(13, "Permission denied", "a/b"), "correct the path"),
    ],
)
def test_a_disk_or_a_folder_that_cannot_be_written_is_one_line(fault: Exception, words: str) -> None:
    with pytest.raises(SystemExit) as ended, shown.ending_for_mistakes():
        raise fault
    told = str(ended.value)
    assert (told.startswith("error: "), words in told, "\n" in told) == (True, True, False)
    with pytest.raises(KeyError), shown.ending_for_mistakes():
        raise KeyError("a fault of ours keeps its frames")
