"""One shard of a dataset's records, answered by the target: the `shard` verb.

journal.jsonl    a line for each record that is done, in the order in which they were; what a killed job goes on from
shard.json       written last: the counts, and the journal's hash
"""

import json
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from longspec import jsonl
from longspec.answers import client, server
from longspec.answers.conversation import FAILED, Conversation, Key, check_lines
from longspec.answers.questions import Asker
from longspec.answers.settings import ENDPOINT, JOURNAL, PRINTED, SERVED, Regenerate, deciding
from longspec.answers.tally import Tally
from longspec.atomic_files import check_files, checked_folder, describe_files, read_json, sha256_file, write_json
from longspec.data.read.records import RecordError
from longspec.data.tokenize import load
from longspec.distributed import ALONE, Ranks, log
from longspec.families import position_limit
from longspec.journal import Followed, Journal, journal_of
from longspec.lease import acquire
from longspec.models.target import read_target_config

FILES = ("train", "held_out")
SYNC = 5.0  # seconds of work that a power cut may cost, beyond a batch


def read(raw: Path, shard: int, num_shards: int, cut: str) -> list[Conversation]:
    """Every num_shards-th record of each raw file, from the shard's first one on. Raises ValueError with file and line."""
    found = []
    for name in FILES:
        path = raw.parent / f"{name}.jsonl"
        for line, record in enumerate(jsonl.read(path), 1):
            if (line - 1) % num_shards != shard:
                continue
            try:
                found.append(Conversation((name, line), record, cut))
            except RecordError as error:
                raise ValueError(f"{path}: line {line}: {error}; make the file again") from error
    return found


def make(
    raw: Path, target: Path, tokenizer: Path, settings: Regenerate, part: tuple[int, int], out: Path, ranks: Ranks = ALONE
) -> dict[str, Any]:
    """Answer the shard `part` of (shard, number of shards); its manifest, which `out` then holds.

    raw, target, tokenizer: their manifests; ranks: that hold the target together, of which the first one writes. Raises
    ValueError for files that are not those of the manifests, and when too many records failed: the next job goes on with these.
    Answers by other settings, of another target, or by a server that serves another model, are left out by name.
    """
    shard, num_shards = part
    if not 0 <= shard < num_shards:
        raise ValueError(f"--shard: must lie in 0..{num_shards - 1}, is {shard}")
    if ranks.world_size > 1:
        if settings.engine == ENDPOINT:
            raise ValueError(f"engine: {ENDPOINT}: asks a server, and was started on {ranks.world_size} ranks; start one")
        from longspec.models.target import join_ranks

        join_ranks(ranks)
    told = read_json(raw)
    check_files(raw.parent, told["files"], raw, once=True)
    folder = Path(checked_folder(target))
    made_with = {"dataset": told["name"], "settings": json.loads(deciding(settings)), "raw": sha256_file(raw)}
    made_with |= {"target": sha256_file(target), "tokenizer": sha256_file(tokenizer), "num_shards": num_shards}
    endpoint = None  # where this job computes, or starts a server
    if settings.endpoint is not None:
        endpoint = client.Client(settings.endpoint, settings)
        made_with |= {SERVED: endpoint.find_model()}
    positions = position_limit(read_target_config(folder))
    asker = Asker(load(tokenizer)[0], folder, positions, settings, f"data.{told['name']}.regenerate")
    conversations = read(raw, shard, num_shards, settings.cut)
    with _alone_in(out, ranks):
        identity, of = made_with | {"shard": shard}, f"{told['name']}'s answers"
        with journal_of(out.parent / JOURNAL, identity, ranks, of=of, aside=True) as journal:
            tally = _answer(conversations, journal, folder, settings, asker, endpoint, ranks)
        manifest = identity | tally.describe()
        if ranks.is_main:
            manifest |= {"files": describe_files(out.parent, [JOURNAL])}
            write_json(out, manifest)
    return manifest


@contextmanager
def _alone_in(out: Path, ranks: Ranks) -> Iterator[None]:
    """Within the block no other job writes beside `out`, which is removed: it must not stand beside a journal that grows."""
    if not ranks.is_main:
        yield
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    lease = acquire(out.parent)
    try:
        out.unlink(missing_ok=True)
        yield
    finally:
        lease.release()


def _answer(
    conversations: list[Conversation],
    journal: Journal | Followed,
    target: Path,
    settings: Regenerate,
    asker: Asker,
    endpoint: client.Client | None,
    ranks: Ranks,
) -> Tally:
    """A line of the journal for each conversation that did not fail."""
    done = check_lines(journal.path, journal.lines or [], {each.key for each in conversations})
    tally = Tally(len(conversations), journal.lines or [])
    lengths = asker.first_lengths([each for each in conversations if not each.end])
    ended = [each for each in conversations if each.end and each.key not in done]
    going = [each for each in conversations if not each.end]
    log(f"{len(conversations):,} records, {len(done):,} of them done; {len(going):,} ask something", ranks)
    synced = time.monotonic()
    with _engine(going, lengths, done, target, settings, asker, endpoint, journal.path, ranks) as answered:
        for together in chain([ended], answered):
            for each in together:
                if each.end != FAILED:
                    journal.append(each.line())
                tally.count(each)
            tally.check(settings.max_failed)
            if time.monotonic() - synced > SYNC:
                journal.sync()
                synced = time.monotonic()
    journal.sync()
    if ranks.is_main:
        tally.tell()
    return tally


@contextmanager
def _engine(
    going: list[Conversation],
    lengths: dict[Key, int],
    done: set[Key],
    target: Path,
    settings: Regenerate,
    asker: Asker,
    endpoint: client.Client | None,
    journal: Path,
    ranks: Ranks,
) -> Iterator[Iterator[list[Conversation]]]:
    """The conversations as the chosen engine ends them; a server of the job's own lives as long as the block."""
    left = [each for each in going if each.key not in done]
    if settings.engine != ENDPOINT:
        from longspec.answers import local  # torch, which no server needs

        yield local.answered(going, lengths, done, target, settings, asker, ranks)
    elif not left:
        yield iter(())
    elif endpoint is not None:
        with closing(_asked(left, endpoint, asker, journal)) as answered:
            yield answered
    else:
        assert settings.server is not None
        with server.started(settings.server, target, settings.server_minutes, journal.with_name(PRINTED)) as address:
            own = client.Client(address, settings, own=True)
            own.find_model()
            with closing(_asked(left, own, asker, journal)) as answered:
                yield answered


def _asked(
    left: list[Conversation], asked: client.Client, asker: Asker, journal: Path
) -> Generator[list[Conversation], None, None]:
    log(f"{asked.address}: asking {asked.model}, {asked.settings.requests} at a time")
    try:
        yield from client.answered(left, asked, asker)
    except client.OtherPromptError as error:
        raise ValueError(f"{error}; remove {journal} if answers by that server stand in it") from None
