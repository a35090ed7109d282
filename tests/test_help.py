"""`python -m longspec.<room> [<verb>] --help`: what a verb does and what each of its options is."""

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
# Of rooms whose parser does not list its verbs.
VERBS = {"cluster": list(cluster.VERBS), "measure": list(measure.VERBS), "train": ["plan"]}


@pytest.mark.parametrize("room", ROOMS)
def test_help_says_what_everything_is(room: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    parsers: list[argparse.ArgumentParser] = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # which a verb may set before it reads its arguments
    print_help = argparse.ArgumentParser.print_help
    monkeypatch.setattr(argparse.ArgumentParser, "print_help", lambda parser: parsers.append(parser) or print_help(parser))
    main = importlib.import_module(f"longspec.{room}.__main__").main

    def text_of(*verb: str) -> str:
        monkeypatch.setattr(sys, "argv", [room, *verb, "--help"])
        with pytest.raises(SystemExit) as end:
            sys.exit(main())
        assert end.value.code in (0, None)
        return capsys.readouterr().out

    text = text_of()
    verbs = VERBS.get(room) or [verb for listed in re.findall(r"\{([\w,-]+)\} \.\.\.", text) for verb in listed.split(",")]
    for verb in verbs:
        assert verb in text
        text_of(verb)
    for parser in parsers:
        assert parser.description, parser.prog
        options = [action for action in parser._actions if not isinstance(action.choices, dict)]  # of verbs it is a dict
        assert [option.dest for option in options if not option.help] == [], parser.prog
