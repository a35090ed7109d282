"""`python -m longspec.<room> [<verb>] --help`: on one screen, what a verb does and what each of its options is."""

import argparse
import importlib
import re
import signal
import sys
from pathlib import Path

import pytest

from longspec.cluster import __main__ as cluster
from longspec.measure import __main__ as measure

ROOMS = sorted(path.parent.name for path in (Path(__file__).parents[1] / "src/longspec").glob("*/__main__.py"))
BY_DOCSTRING = {"cluster": list(cluster.VERBS), "measure": list(measure.VERBS)}  # rooms that list their verbs by themselves
VERBS = BY_DOCSTRING | {"train": ["plan"]}  # of rooms whose parser does not list them
COLUMNS, SCREEN = 100, 24
LARGER = {"train": 32, "train plan": 29}  # with more options than a screen has lines for


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[argparse.ArgumentParser]:
    """The parsers whose help was printed."""
    parsers: list[argparse.ArgumentParser] = []
    print_help = argparse.ArgumentParser.print_help

    def noted(parser: argparse.ArgumentParser, file: object = None) -> None:
        parsers.append(parser)
        print_help(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "print_help", noted)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # which a verb may set before it reads its arguments
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    return parsers


@pytest.mark.parametrize("room", ROOMS)
def test_help_fits_a_screen_and_says_what_everything_is(
    room: str,
    shown: list[argparse.ArgumentParser],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main = importlib.import_module(f"longspec.{room}.__main__").main

    def text_of(*verb: str) -> str:
        monkeypatch.setattr(sys, "argv", [room, *verb, "--help"])
        with pytest.raises(SystemExit) as end:
            sys.exit(main())
        assert end.value.code in (0, None)
        return capsys.readouterr().out

    helps = {room: text_of()}
    listed = re.findall(r"\{([\w,-]+)\} \.\.\.", helps[room])
    verbs = VERBS.get(room) or [verb for verbs in listed for verb in verbs.split(",")]
    assert [verb for verb in verbs if verb not in helps[room]] == []
    helps |= {f"{room} {verb}": text_of(verb) for verb in verbs}
    lines = {command: len(text.splitlines()) for command, text in helps.items()}
    assert {command: number for command, number in lines.items() if number > LARGER.get(command, SCREEN)} == {}
    assert [line for text in helps.values() for line in text.splitlines() if len(line) > COLUMNS] == []
    for parser in shown:
        assert parser.description, parser.prog
        options = [action for action in parser._actions if not isinstance(action.choices, dict)]  # of verbs it is a dict
        assert [option.dest for option in options if not option.help] == [], parser.prog
    assert len(shown) == len(helps) - (room in BY_DOCSTRING)
