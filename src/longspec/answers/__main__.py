"""Conversations answered anew by the target itself; docs/answers.md has the whole story.

A killed job is started again by the same command and goes on where it was.
"""

import argparse
import json
import signal
import sys
import traceback
from pathlib import Path

from longspec import shown
from longspec.data.layout_tally import cut_warning
from longspec.distributed import Ranks, end_at_once, launched_ranks, log
from longspec.shown import add_verb


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m longspec.answers", description=__doc__)
    verbs = top.add_subparsers(dest="verb", required=True)
    verb = add_verb(verbs, "shard", "write the target's answers to one shard of a dataset's records")
    verb.add_argument("--raw", required=True, type=Path, help="manifest.json of the raw records")
    verb.add_argument("--target", required=True, type=Path, help="target_manifest.json")
    verb.add_argument("--tokenizer", required=True, type=Path, help="tokenizer_manifest.json")
    verb.add_argument("--settings", required=True, type=json.loads, help="data.<name>.regenerate of workflow.yaml, as JSON")
    verb.add_argument("--runtime", type=json.loads, default={}, help="those of its keys that decide no answer, as JSON")
    verb.add_argument("--shard", type=int, default=0, help="this shard, from 0")
    verb.add_argument("--num-shards", type=int, default=1, help="of how many; default: 1")
    verb.add_argument("--out", required=True, type=Path, help="the manifest to write, the answers beside it")
    verb = add_verb(
        verbs, "merge", "join the answers of all shards into a dataset, to tokenize in the place of the raw records"
    )
    verb.add_argument("shards", type=Path, nargs="+", help="the manifest of each shard")
    verb.add_argument("--raw", required=True, type=Path, help="manifest.json of the raw records")
    verb.add_argument("--out", required=True, type=Path, help="the manifest to write, the records beside it")
    return top


def run(arguments: argparse.Namespace, ranks: Ranks) -> str:
    """Run one verb; return what to log of it."""
    from longspec.answers import merge

    if arguments.verb == "merge":
        made = merge.merge(arguments.shards, arguments.raw, arguments.out)
        return "\n".join(filter(None, [merge.counts_line(made["answers"]), cut_warning(made)]))
    from longspec.answers import settings, shard

    name = json.loads(arguments.raw.read_bytes())["name"] if arguments.raw.is_file() else arguments.raw.parent.name
    chosen = settings.parse(name, arguments.settings | arguments.runtime)
    part = (arguments.shard, arguments.num_shards)
    made = shard.make(arguments.raw, arguments.target, arguments.tokenizer, chosen, part, arguments.out, ranks)
    return merge.counts_line(made)


def main() -> None:
    arguments, code, ranks = parser().parse_args(), 0, launched_ranks()
    if ranks.world_size == 1:
        # A signal exits by way of SystemExit, which ends the server that this job has started.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        with shown.ending_for_mistakes():
            log(f"{arguments.out}: {run(arguments, ranks)}", ranks)
    except SystemExit as end:
        code = 1 if isinstance(end.code, str) else int(end.code or 0)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    end_at_once(code)  # requests that nobody waits for would keep it alive


if __name__ == "__main__":
    main()
