"""`longspec try`: the same text twice as it comes, by the target alone and with the draft, and what that saved."""

import argparse
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.text import Text
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from longspec import shown
from longspec.cli.asked import Asked, asked_of, target_of
from longspec.decode.autoregressive import Plain, decode_plain, near_tie_margin
from longspec.decode.cache import tokens_ahead
from longspec.decode.chain_costs import best_shape, nodes_of
from longspec.decode.generate import load_drafter
from longspec.decode.levels import DEFAULT_SHAPE
from longspec.decode.prefill import prefill
from longspec.decode.speculate import speculate
from longspec.decode.texts import Row, ends_of_text
from longspec.measure.sample import Pieces
from longspec.models.target import load_target, read_target_config

OWN, DRAFTED = "", ("#000000 on #d7f5d7", "#000000 on #a8e6a1", "#000000 on #6fd06f", "#000000 on #3fb950")
WIDTH = 100
PICTURE = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)  # which would ask a server for letters


@dataclass
class Shown:
    """A text on its way to the terminal, and the seconds that showing it took."""

    console: Console
    pieces: Pieces
    seconds: float = 0.0

    def add(self, tokens: list[int]) -> None:
        """Show the tokens of a round: all but the last are drafted ones."""
        began = time.perf_counter()
        for place, token in enumerate(tokens):
            drafted = place < len(tokens) - 1
            style = DRAFTED[min(place, len(DRAFTED) - 1)] if drafted else OWN
            self.console.print(Text(shown.lines(self.pieces.text_of(token)), style), end="", soft_wrap=True)
        self.console.file.flush()
        self.seconds += time.perf_counter() - began


@dataclass(frozen=True)
class Outcome:
    """Both texts with their seconds, the showing left out."""

    plain: Plain
    plain_seconds: float
    row: Row
    seconds: float

    def lines(self) -> list[str]:
        """Say speed, tokens a round, and whether the texts are equal."""
        plain, drafted = len(self.plain.ids) / self.plain_seconds, len(self.row.ids) / self.seconds
        a_round = 1.0 if not self.row.rounds else self.row.new_tokens / self.row.rounds
        return [
            f"plain {plain:.1f} tokens/s, with the draft {drafted:.1f} tokens/s: {drafted / plain:.2f} times",
            f"{a_round:.2f} tokens a round, {sum(self.row.accepted)} of {len(self.row.ids)} tokens drafted",
            self._equal(),
        ]

    def _equal(self) -> str:
        pairs = list(zip(self.plain.ids, self.row.ids, strict=False))
        place = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
        if place is None:
            return "texts equal"
        logits_V = self.plain.logits[place].float()
        margin = float(logits_V[self.plain.ids[place]] - logits_V[self.row.ids[place]])
        if abs(margin) <= near_tie_margin(self.plain.logits[place]):
            return f"texts equal up to token {place}, where two tokens tie within rounding ({margin:.2g} apart)"
        return f"TEXTS DIFFER at token {place} by {margin:.2g}: please report this with the draft's provenance.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `try`."""
    parser.add_argument("draft", type=Path, help="a draft's folder, such as results/demo/sinkpi-slicing/final_draft")
    parser.add_argument("question", nargs="?", help="left out: the first held-out record of the draft's data")
    parser.add_argument("--target", help="its folder; left out: the one that the draft was trained for")
    parser.add_argument("--new-tokens", type=int, default=128, help="default: 128")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--svg", type=Path, help="write the terminal's picture to this file too")


def run(options: argparse.Namespace) -> int:
    """Decode twice and show both; 1 where the texts differ. Raises ValueError for what cannot be decoded."""
    if not (options.draft / "config.json").is_file():
        raise ValueError(
            f"{options.draft}: is no draft's folder: it has no config.json; give results/<run>/<variant>/final_draft"
        )
    if options.new_tokens < 1:
        raise ValueError(f"--new-tokens: must be 1 or more, is {options.new_tokens}")
    if options.threads:
        torch.set_num_threads(options.threads)
    path = target_of(options.draft, options.target)
    asked = Asked(options.question, is_question=True) if options.question else asked_of(options.draft)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, options.dtype or ("bfloat16" if device == "cuda" else "float32"))
    disable_progress_bar()
    target = load_target(path, read_target_config(path), dtype).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    console = Console(record=options.svg is not None, width=WIDTH if options.svg else None, highlight=False)
    console.print(
        Text(f"{options.draft} beside {path}, {options.dtype or str(dtype).removeprefix('torch.')} on {device}", "dim")
    )
    console.print(Text(f"> {shown.lines(asked.text.strip())}\n", "bold"))
    outcome = decode_both(target, tokenizer, options.draft, asked.prompt(tokenizer), options.new_tokens, console)
    for line in outcome.lines():
        console.print(line)
    if options.svg is not None:
        console.save_svg(str(options.svg), title="longspec try", code_format=PICTURE)
    return 0 if outcome.lines()[-1].startswith("texts equal") else 1


def decode_both(target: Any, tokenizer: Any, draft: Path, prompt: list[int], new_tokens: int, console: Console) -> Outcome:
    """Decode a prompt greedily without and with a draft, both as they come."""
    drafter, eos = load_drafter(target, draft), ends_of_text(target, tokenizer)
    room = tokens_ahead(new_tokens, nodes_of(drafter))
    decode_plain(target, prefill(target, [prompt], room, drafter.reads), 2, eos)  # the first forwards are slower ones
    console.rule("the target alone", align="left", style="dim")
    screen = Shown(console, Pieces(tokenizer, prompt))
    start = prefill(target, [prompt], room, drafter.reads)
    plain = decode_plain(target, start, new_tokens, eos, on_token=lambda token: screen.add([token]))
    plain_seconds = plain.seconds - screen.seconds
    console.print("\n")
    start = prefill(target, [prompt], room, drafter.reads)
    shape = best_shape(target, drafter, start, 0.0) if drafter.acceptance else DEFAULT_SHAPE
    console.rule("with the draft; what it drafted is green", align="left", style="dim")
    screen = Shown(console, Pieces(tokenizer, prompt))
    start = prefill(target, [prompt], room, drafter.reads)
    decoded = speculate(
        target,
        drafter,
        start,
        max_new_tokens=new_tokens,
        shape=shape,
        eos=eos,
        on_tokens=lambda _, tokens: screen.add(tokens),
    )
    console.print("\n")
    return Outcome(plain, plain_seconds, decoded.rows[0], decoded.seconds - screen.seconds)
