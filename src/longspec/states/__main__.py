"""The target's states, computed once and stored; docs/states.md has the whole story.

A killed builder is started again by the same command and goes on where it was.
"""

import argparse
import sys
from pathlib import Path

from longspec.config import PARTITIONED, Recipe, Runtime, load
from longspec.data.pack.arrow_shards import PackedRows
from longspec.distributed import end_at_once, find_ranks, log
from longspec.process_group import own_device
from longspec.shown import add_verb, of_disk, one_line
from longspec.states.build import Computation, build, rows_of


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = argparse.ArgumentParser(prog="python -m longspec.states", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    builder = add_verb(verbs, "build", "store the states of a shard of packed rows, or of held-out rows")
    builder.add_argument("--recipe", type=Path, required=True, help="recipe.yaml of a stage that reads them")
    builder.add_argument("--runtime", type=Path, required=True, help="runtime.yaml: micro batch, target, attention")
    builder.add_argument("--target", type=Path, required=True, help="target_manifest.json")
    builder.add_argument("--data", type=Path, required=True, help="manifest.json of the packed rows")
    builder.add_argument("--vocabulary", type=Path, help="draft_vocabulary_{size}.json, for recipe.states.top_k")
    builder.add_argument("--out", type=Path, required=True, help=".../0-of-4, the folder of a shard, or .../held-out-8")
    return parser


def main() -> None:
    """Run one rank; report a user's mistake in one line."""
    options, code = parser().parse_args(), 0
    try:
        ranks, recipe, runtime = find_ranks(), load(options.recipe, Recipe), load(options.runtime, Runtime)
        device = own_device(ranks)
        if ranks.world_size > 1 or runtime.target == PARTITIONED:
            from longspec.train.engine import boot  # DeepSpeed takes seconds to import

            device = boot(ranks, runtime.timeout_minutes)
        source, rows = rows_of(options.out, PackedRows(options.data))
        computation = Computation(recipe, runtime, options.target, source, options.vocabulary, device)
        log(f"done: {build(options.out, computation, rows, ranks)}", ranks)
    except (ValueError, OSError) as error:
        print(of_disk(error) or f"error: {one_line(error)}", file=sys.stderr, flush=True)
        code = 1
    end_at_once(code)


if __name__ == "__main__":
    main()
