"""`longspec try`: the same text twice as it comes, by the target alone and with the draft, and what that saved."""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from longspec import jsonl, shown
from longspec.atomic_files import read_json
from longspec.config import yaml_files
from longspec.config.schema import mix_of
from longspec.data.chat.encoding import Encoder
from longspec.data.read.records import Chat, to_messages_or_text
from longspec.decode.autoregressive import Plain, decode_plain
from longspec.decode.cache import tokens_ahead
from longspec.decode.chain_costs import best_shape, best_way, nodes_of
from longspec.decode.fallback import NoDraft
from longspec.decode.generate import load_drafter
from longspec.decode.levels import DEFAULT_SHAPE, Shape, depth_of
from longspec.decode.prefill import prefill
from longspec.decode.speculate import speculate
from longspec.decode.texts import Row, ends_of_text
from longspec.measure.lines import judge
from longspec.measure.measurer import gap_of
from longspec.measure.sample import Pieces
from longspec.methods.draft_files import CONFIG, find_target
from longspec.models.target import load_target, resolve_dtype
from longspec.models.target_config import read_target_config

OWN, DRAFTED = "", ("#000000 on #d7f5d7", "#000000 on #a8e6a1", "#000000 on #6fd06f", "#000000 on #3fb950")
CHARACTERS = 400  # of a running text that is continued
EQUAL = "texts equal"
LEFT_OUT, LOOKED_UP = "leave it out", "take prompt lookup alone"  # what generate does if the draft does not pay


def target_of(draft: Path, given: str | None) -> str:
    """Return the target's folder: the given one, or the one that the draft was trained for.

    Raises ValueError if it is not on this machine.
    """
    told, seen = str(read_json(draft / CONFIG).get("target_path") or ""), f"(seen from {Path.cwd()})"
    if given:
        if not (Path(given) / CONFIG).is_file():
            raise ValueError(f"--target: {given}: has no config.json {seen}; give the target's folder")
        return given
    if (found := find_target(draft, told)) is not None:
        return str(found)
    raise ValueError(f"{draft}: its target, {told or 'which it does not name'}, is not here {seen}; give --target FOLDER")


def asked_of(draft: Path) -> tuple[str, bool]:
    """Return the first held-out record of the last stage's data, and whether it is a question; else it is a text's beginning.

    Raises ValueError if that data is not on this machine.
    """
    provenance, settings = draft / "provenance.json", draft / "training_config.yaml"
    stages = yaml_files.read(settings) if settings.is_file() else {}  # up to the published one, sorted by name
    order = [name for name in read_json(provenance)["order"] if name in stages] if provenance.is_file() else list(stages)
    for name in reversed([name for stage in order for name in mix_of(stages[stage]["recipe"]["data"]["name"])]):
        path = Path("data/raw") / name / "held_out.jsonl"
        record = next(iter(jsonl.read(path)), None) if path.is_file() else None
        if record is not None:
            document = to_messages_or_text(record, unanswered=True)
            if not isinstance(document, Chat):
                return document.text[:CHARACTERS], False
            return next(turn["content"] for turn in document.messages if turn["role"] == "user"), True
    raise ValueError(f"{draft}: no held-out record of its data is here (seen from {Path.cwd()}); give a question in quotes")


@dataclass
class Shown:
    """Show a text at the terminal as it comes, and count the seconds that showing takes."""

    console: Console
    pieces: Pieces
    seconds: float = 0.0

    def add(self, tokens: list[int]) -> None:
        """Show the tokens of a round; all but the last are drafted ones."""
        began = time.perf_counter()
        for place, token in enumerate(tokens):
            drafted = place < len(tokens) - 1
            style = DRAFTED[min(place, len(DRAFTED) - 1)] if drafted else OWN
            self.console.print(Text(shown.lines(self.pieces.text_of(token)), style), end="", soft_wrap=True)
        self.console.file.flush()
        self.seconds += time.perf_counter() - began


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `try`."""
    parser.add_argument("draft", type=Path, help="a draft's folder, such as results/demo/sinkpi-slicing/final_draft")
    parser.add_argument("question", nargs="?", help="left out: the first held-out record of the draft's data")
    parser.add_argument("--target", help="its folder; left out: the one that the draft was trained for")
    parser.add_argument("--new-tokens", type=shown.at_least(1), default=128, help="default: 128")


def run(options: argparse.Namespace) -> int:
    """Decode twice and show both; return 1 if the texts differ, else 0. Raises ValueError for what cannot be decoded."""
    if not (options.draft / "config.json").is_file():
        raise ValueError(f"{options.draft}: has no config.json; give a draft's folder, results/<run>/<variant>/final_draft")
    path = target_of(options.draft, options.target)
    text, is_question = (options.question, True) if options.question else asked_of(options.draft)
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", resolve_dtype("auto")
    disable_progress_bar()
    try:
        target = load_target(path, read_target_config(path), dtype).to(device).eval()
    except torch.OutOfMemoryError:
        raise ValueError(
            f"{path}: does not fit this GPU beside what is on it; free it, or use the CPU: CUDA_VISIBLE_DEVICES= in front"
        ) from None
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    chat = is_question and getattr(tokenizer, "chat_template", None) is not None
    prompt = Encoder(tokenizer).prompt(text, chat=chat)
    console = Console(highlight=False)
    console.print(Text(f"{options.draft} beside {path}, {str(dtype).removeprefix('torch.')} on {device}", "dim"))
    console.print(Text(f"> {shown.lines(text.strip())}\n", "bold"))
    lines = outcome(*decode_both(target, tokenizer, options.draft, prompt, options.new_tokens, console))
    for line in lines:
        console.print(line)
    return 0 if lines[-1].startswith(EQUAL) else 1


def decode_both(
    target: Any, tokenizer: Any, draft: Path, prompt: list[int], new_tokens: int, console: Console
) -> tuple[Plain, float, Row, float]:
    """Decode a prompt greedily without and with a draft, and show both; return both, each with its seconds without showing."""
    drafter, eos = load_drafter(target, draft), ends_of_text(target, tokenizer)
    room = tokens_ahead(new_tokens, nodes_of(drafter))
    decode_plain(target, prefill(target, [prompt], room, drafter.reads), 2, eos)  # the first forwards are slower
    console.rule("the target alone", align="left", style="dim")
    alone = Shown(console, Pieces(tokenizer, prompt))
    start = prefill(target, [prompt], room, drafter.reads)
    plain = decode_plain(target, start, new_tokens, eos, on_token=lambda token: alone.add([token]))
    console.print("\n")
    start = prefill(target, [prompt], room, drafter.reads)
    shape: Shape = DEFAULT_SHAPE
    instead = ""
    if drafter.acceptance:
        shape, (way, _) = best_shape(target, drafter, start), best_way(target, drafter, start)
        if isinstance(way.drafter, NoDraft):
            instead = LOOKED_UP if way.copying and way.copying.pays else LEFT_OUT
    else:  # its first rounds are slower
        speculate(target, drafter, start, max_new_tokens=2 * depth_of(shape), shape=shape)
    console.rule("with the draft; what it drafted is green", align="left", style="dim")
    if instead:
        console.print(Text(f"generate would {instead}, which is faster on this machine", "dim"))
    both = Shown(console, Pieces(tokenizer, prompt))
    start = prefill(target, [prompt], room, drafter.reads)
    decoded = speculate(
        target, drafter, start, max_new_tokens=new_tokens, shape=shape, eos=eos, on_tokens=lambda _, tokens: both.add(tokens)
    )
    console.print("\n")
    return plain, plain.seconds - alone.seconds, decoded.rows[0], decoded.seconds - both.seconds


def outcome(plain: Plain, plain_seconds: float, row: Row, seconds: float) -> list[str]:
    """Return lines with speed, tokens per round, and whether the texts are equal."""
    alone, drafted = len(plain.ids) / plain_seconds, len(row.ids) / seconds
    a_round = row.new_tokens / row.rounds if row.rounds else 1.0
    said = [
        f"plain {alone:.1f} tokens/s, with the draft {drafted:.1f} tokens/s: {drafted / alone:.2f} times",
        f"{a_round:.2f} tokens a round, {min(sum(row.accepted), len(row.ids) - row.rounds)} of {len(row.ids)} tokens drafted",
    ]
    length = min(len(plain.ids), len(row.ids))  # a last round may bring more than was asked for
    verdict = judge(plain.ids[:length], row.ids[:length], gap_of(plain))
    if not verdict.mismatches:
        return [*said, EQUAL]
    place = verdict.tokens_compared - 1
    if verdict.near_ties:
        return [*said, f"{EQUAL} up to token {place}, where two tokens tie within rounding ({verdict.margin:.2g} apart)"]
    return [*said, f"TEXTS DIFFER at token {place} by {verdict.margin:.2g}: please report this with the draft's provenance"]
