"""Acceptance of drafted chains and trees, as the evaluation stores it; decode/chain_costs.py chooses the shape by it.

No torch: reports import it too.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from longspec.atomic_files import read_json, write_json
from longspec.decode.levels import Budget, Shape, shape_of, stored

FILE = "acceptance.json"  # in a final draft's folder, once it was evaluated
LONGEST = 16  # tokens of the longest chain whose cost is measured


def shape_name(shape: Any) -> str:
    """Return a shape's name, such as: chain of 4; tree 4-16-16; tree of up to 16, 8 deep."""
    shape = shape if isinstance(shape, Budget) else shape_of(shape)
    if isinstance(shape, Budget):
        return f"tree of up to {shape.nodes}, {shape.depth} deep"
    return f"chain of {shape}" if isinstance(shape, int) else f"tree {'-'.join(map(str, shape))}"


@dataclass(frozen=True)
class ChainAcceptance:
    """Hold, for chains at a temperature, (kept, reached) of each position: rounds that kept its token, and all before it."""

    temperature: float
    positions: tuple[tuple[int, int], ...]

    def expected_tokens(self) -> list[float]:
        """Return tokens per round for chains of 1, 2, ... drafts, with the target's own: 1 + sum over i of prod(a_1 .. a_i).

        a_i: of the rounds that kept all tokens before token i, the share that kept token i too. arXiv 2211.17192, section 3.1,
        has the same a for all i.
        """
        shares = [kept / reached if reached else 0.0 for kept, reached in self.positions]
        return [1 + brought for brought in accumulate(accumulate(shares, mul))]


@dataclass(frozen=True)
class TreeAcceptance:
    """Hold the acceptance of a tree with these levels at a temperature: its rounds and their tokens, the target's own included.

    copied: the most prompt-lookup tokens that stood beside it, 0 for none; with them a chain counts as a tree too. An entry
    without levels is of prompt lookup alone.
    """

    temperature: float
    levels: Shape
    tokens: int
    rounds: int
    copied: int = 0

    @property
    def expected_tokens(self) -> float:
        """Return tokens per round."""
        return self.tokens / self.rounds


Acceptance = ChainAcceptance | TreeAcceptance


def nearest(held: Sequence[Acceptance], temperature: float, with_lookup: bool = False) -> list[Acceptance]:
    """Return the entries at the temperature nearest to this one; of two equally near, the one that comes first.

    with_lookup: return trees that had prompt lookup beside them, if there are any; else the entries of the draft alone.
    Entries of prompt lookup without a draft follow.
    """
    trees = [each for each in held if isinstance(each, TreeAcceptance)]
    alone, beside = ([each for each in trees if each.copied and bool(each.levels) == drafted] for drafted in (False, True))
    drafted = beside if with_lookup and beside else [each for each in held if each not in (*alone, *beside)]
    return [*_at_nearest(drafted, temperature), *_at_nearest(alone, temperature)]


def _at_nearest(held: Sequence[Acceptance], temperature: float) -> list[Acceptance]:
    found = min((each.temperature for each in held), key=lambda each: abs(each - temperature), default=0.0)
    return [each for each in held if each.temperature == found]


def pooled(temperature: float, lines: Iterable[Sequence[Sequence[int]]]) -> ChainAcceptance:
    """Return the summed acceptance of several texts. lines: the (kept, reached) pairs of each text."""
    places = zip(*lines, strict=True)
    return ChainAcceptance(temperature, tuple((sum(k for k, _ in pairs), sum(r for _, r in pairs)) for pairs in places))


def write_acceptance(folder: Path, held: Sequence[Acceptance]) -> None:
    """Write acceptance.json into a draft's folder, whole or not at all."""
    chains = [vars(each) for each in held if isinstance(each, ChainAcceptance)]
    # A field at its default is left out, as in files from before the field existed.
    found = [(vars(each) | {"levels": stored(each.levels)}).items() for each in held if isinstance(each, TreeAcceptance)]
    trees = [{name: value for name, value in each if name != "copied" or value} for each in found]
    write_json(folder / FILE, {"chains": chains} | ({"trees": trees} if trees else {}))


def read_acceptance(draft: Path) -> tuple[Acceptance, ...]:
    """Return the acceptance stored in a draft's folder, or beside its weight file; () if there is no file.

    Raises ValueError, with file and fix, if the content does not fit.
    """
    path = (draft if draft.is_dir() else draft.parent) / FILE
    if not path.is_file():
        return ()
    content = read_json(path)
    try:
        chains = [
            ChainAcceptance(each["temperature"], tuple((kept, reached) for kept, reached in each["positions"]))
            for each in content["chains"]
        ]
        trees = [TreeAcceptance(**each | {"levels": shape_of(each["levels"])}) for each in content.get("trees", [])]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: is no acceptance by position and tree ({type(error).__name__}: {error}); remove the file, then chains "
            "have their usual length, or make the report again (rule report), which writes it"
        ) from error
    return (*chains, *trees)
