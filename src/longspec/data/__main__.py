"""From the records of a dataset to packed rows of tokens."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from longspec import shown
from longspec.config import COLLATIONS, OVERLONG
from longspec.data import draft_vocabulary, hub, inspection, raw, tokenize
from longspec.data.layout_tally import REWRITE_COUNTS, unlike_served_warning
from longspec.data.pack import packing
from longspec.shown import add_verb, named_path


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    top = argparse.ArgumentParser(prog="python -m longspec.data", description=__doc__)
    verbs = top.add_subparsers(dest="verb", required=True)
    verb = add_verb(verbs, "fetch", "fetch a dataset's files from the hub, pinned to a commit; HF_TOKEN opens closed ones")
    verb.add_argument("--source", required=True, help="hf:<owner>/<repository>[:config][:split] or hf:.../<file>")
    verb.add_argument("--revision", default="main", help="a branch, a tag or a commit")
    verb.add_argument("--out", required=True, type=Path, help="the manifest to write, the files beside it")
    verb = add_verb(verbs, "raw", "read and check the records of one dataset, the held-out ones apart")
    verb.add_argument("--name", required=True, help="the dataset's name")
    verb.add_argument("--settings", required=True, type=json.loads, help="the dataset's entry of workflow.yaml, as JSON")
    verb.add_argument("--out", required=True, type=Path, help="the manifest to write, the records beside it")
    verb = add_verb(verbs, "tokenize", "write one shard of a raw folder as token ids")
    verb.add_argument("--raw", required=True, type=Path, help="the raw folder's manifest")
    verb.add_argument("--tokenizer", required=True, type=Path, help="a tokenizer manifest")
    verb.add_argument("--shard", type=int, default=0, help="this shard, from 0")
    verb.add_argument("--num-shards", type=int, default=1, help="of how many; default: 1")
    verb.add_argument("--out", required=True, type=Path, help="the manifest to write, the token ids beside it")
    verb = add_verb(verbs, "pack", "make rows of one length from all token shards of a dataset")
    verb.add_argument("--tokens", required=True, nargs="+", type=Path, help="the shards' manifests")
    verb.add_argument("--length", required=True, type=int, help="tokens in a row")
    verb.add_argument("--collation", required=True, choices=list(COLLATIONS), help="long and longcot train answers alone")
    verb.add_argument("--overlong", default="split", choices=OVERLONG, help="what becomes of documents longer than a row")
    verb.add_argument("--out", required=True, type=Path, help="the manifest to write, the rows beside it")
    verb = add_verb(verbs, "vocabulary", "choose the tokens that a draft can propose: the most frequent ones of all rows")
    verb.add_argument(
        "--packed", required=True, nargs="+", type=named_path, metavar="NAME=MANIFEST", help="the rows of each stage"
    )
    verb.add_argument("--target", required=True, type=Path, help="the target's manifest, for its number of tokens")
    verb.add_argument("--size", required=True, type=int, help="how many tokens")
    verb.add_argument("--ids-of", type=Path, help="another vocabulary: its tokens are taken over")
    verb.add_argument("--out", required=True, type=Path, help="the file to write")
    verb = add_verb(verbs, "inspect", "print a row decoded, with its documents, its trained tokens and where they come from")
    verb.add_argument("manifest", type=Path, help="of packed rows")
    verb.add_argument("--row", type=int, default=0, help="which row, from 0")
    return top


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one verb; return the numbers to report."""
    if arguments.verb == "fetch":
        fetched = hub.make(arguments.source, arguments.revision, arguments.out)
        size = sum(file["bytes"] for file in fetched["files"].values())
        return {"commit": fetched["commit"], "files": len(fetched["files"]), "bytes": size}
    if arguments.verb == "raw":
        return raw.make(arguments.name, arguments.settings, arguments.out)["records"]
    if arguments.verb == "tokenize":
        made = tokenize.make(arguments.raw, arguments.tokenizer, arguments.shard, arguments.num_shards, arguments.out)
        told = {key: made[key] for key in ("documents", "skipped", *REWRITE_COUNTS, "tokens", "answer_tokens") if key in made}
        return told | {"warning": unlike_served_warning(made)}
    if arguments.verb == "vocabulary":
        return draft_vocabulary.make(arguments.packed, arguments.target, arguments.size, arguments.ids_of, arguments.out)
    made = packing.make(arguments.tokens, arguments.length, arguments.collation, arguments.overlong, arguments.out)
    told = {key: made[key] for key in ("rows", "documents", "pieces", "tokens", "cut_tokens", "padding_share", "labels")}
    return told | {"warning": packing.without_labels_warning(made)}


def main() -> None:
    """Run the verb of the command line, and print what was made."""
    arguments = parser().parse_args()
    if arguments.verb == "inspect":
        inspection.show(arguments.manifest, arguments.row)
        return
    start = time.perf_counter()
    numbers = run(arguments)
    if warning := numbers.pop("warning", ""):
        print(shown.one_line(f"WARNING {arguments.out}: {warning}"))
    print(shown.one_line(f"{arguments.out}: {json.dumps(numbers)} in {time.perf_counter() - start:.1f} s"))


if __name__ == "__main__":
    with shown.ending_for_mistakes():
        main()
