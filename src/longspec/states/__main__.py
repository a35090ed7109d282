"""The target's states, computed once and stored; docs/states.md has the whole story.

A killed builder is started again by the same command and goes on where it was.
"""

import argparse
import sys
from pathlib import Path

from longspec.config import PARTITIONED, ConfigError, Recipe, Runtime, load
from longspec.data.pack.arrow_shards import PackedRows
from longspec.data.pack.held_out_rows import held_out_rows
from longspec.distributed import end_at_once, find_ranks, log
from longspec.process_group import own_device
from longspec.shown import add_verb, one_line
from longspec.states.build import Computation, build
from longspec.states.declaration import RowSource
from longspec.states.stored_states import rows_of_shard


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="python -m longspec.states", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    builder = add_verb(verbs, "build", "store the states of a shard of packed rows, or of held-out rows")
    builder.add_argument("--recipe", type=Path, required=True, help="recipe.yaml of a stage that reads them")
    builder.add_argument("--runtime", type=Path, required=True, help="runtime.yaml: micro batch, target, attention")
    builder.add_argument("--target", type=Path, required=True, help="target_manifest.json")
    builder.add_argument("--data", type=Path, required=True, help="manifest.json of the packed rows")
    builder.add_argument("--vocabulary", type=Path, help="draft_vocabulary_{size}.json, for recipe.states.top_k")
    builder.add_argument("--out", type=Path, required=True, help="the shard's folder, which gets shard.json and the states")
    builder.add_argument("--shard", type=int, default=0, help="number of this one, from 0")
    builder.add_argument("--num-shards", type=int, default=1, help="of how many; default: %(default)s")
    builder.add_argument("--held-out", action="store_true", help="all held-out rows, as one shard")
    return parser


def main() -> None:
    """Run one rank; what is wrong with what a user gave is one line."""
    options, code = parser().parse_args(), 0
    try:
        ranks, recipe, runtime = find_ranks(), load(options.recipe, Recipe), load(options.runtime, Runtime)
        device = own_device(ranks)
        if ranks.world_size > 1 or runtime.target == PARTITIONED:
            from longspec.train.engine import boot  # DeepSpeed takes seconds to import

            device = boot(ranks, runtime.timeout_minutes)
        packed = PackedRows(options.data)
        source = RowSource(packed, held_out_rows(packed, runtime.held_out_rows) if options.held_out else None)
        rows = rows_of_shard(len(source), options.shard, options.num_shards)
        computation = Computation(recipe, runtime, options.target, source, options.vocabulary, ranks, device)
        path = build(options.out, computation, rows)
        log(f"done: {path}", ranks)
    except (*ConfigError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
        code = 1
    end_at_once(code)


if __name__ == "__main__":
    main()
