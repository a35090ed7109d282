"""Answers by the target to one shard of a dataset's records: the `shard` verb.

journal.jsonl    a line for each finished record, in the order of finishing, failed ones last; a killed job goes on from it
shard.json       written last: what the answers were made with, the counts, and the journal's hash
"""

import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from longspec import jsonl
from longspec.answers import client, server
from longspec.answers.conversation import ENDS, FAILED, FILES, Asker, Conversation, hashes_of
from longspec.answers.settings import ENDPOINT, HASHES, JOURNAL, PRINTED, SERVED, Regenerate, deciding
from longspec.atomic_files import checked_folder, checked_manifest, describe_files, read_json, sha256_file, write_json
from longspec.config.names import HUB_PREFIX, hub_source
from longspec.data.chat.encoding import load_tokenizer
from longspec.data.read.records import RecordError
from longspec.distributed import ALONE, Ranks, log
from longspec.families import position_limit
from longspec.journal import Journal
from longspec.lease import acquire
from longspec.models.target_config import read_target_config, target_hash
from longspec.shown import duration

PROGRESS_SECONDS = 30.0  # between two lines of progress
MAX_REASONS = 10  # in an error or a log
COUNTED = ("record", "end", "reason", "answers", "tokens")  # keys of a journal's line


class Tally:
    """Count over `total` records; `lines` are those that were done before."""

    def __init__(self, total: int, lines: Iterable[dict[str, Any]]) -> None:
        self.total, self.ends, self.reasons = total, Counter[str](), Counter[tuple[str, str]]()
        self.answers = self.tokens = self._before = self._tokens_before = 0
        self._began = self._told = time.monotonic()
        for line in lines:
            self.count(line)
        self._before, self._tokens_before = self.ends.total(), self.tokens

    def count(self, line: dict[str, Any]) -> None:
        """Count one more record. line: as the journal has it."""
        self.ends[line["end"]] += 1
        if line["end"] != FAILED:
            self.answers, self.tokens = self.answers + line["answers"], self.tokens + line["tokens"]
        if line["reason"]:
            # Messages that differ in numbers alone share one line; an address keeps its numbers.
            reason = re.sub(r"(\w+://\S+)|\d+", lambda found: found[1] or "N", line["reason"])
            self.reasons[line["end"], reason] += 1

    def tell(self, every: float = 0.0) -> None:
        """Log progress, speed and time left, at most once in `every` seconds."""
        if time.monotonic() - self._told < every:
            return
        self._told = time.monotonic()
        seconds, done = max(self._told - self._began, 1e-9), self.ends.total()
        rate = (self.tokens - self._tokens_before) / seconds
        left = duration(seconds * (self.total - done) / max(1, done - self._before))
        log(f"{done:,} of {self.total:,} records, {self.ends[FAILED]:,} failed, {rate:,.0f} tokens/s, {left} left")

    def check(self, most: float) -> None:
        """Raise ValueError, with the reasons, if more than the share `most` of all records failed."""
        failed = self.ends[FAILED]
        if failed > most * self.total:
            found = [(count, reason) for (end, reason), count in self.reasons.most_common() if end == FAILED]
            reasons = "; ".join(f"{count} x {reason}" for count, reason in found[:MAX_REASONS])
            raise ValueError(
                f"regenerate.max_failed: {failed} of {self.total} records failed, more than the share {most}: {reasons}; "
                "what is answered stays, and the same command goes on with the others"
            )

    def describe(self) -> dict[str, Any]:
        """Return the counts for a manifest: the ends add up to `records`."""
        assert self.ends.total() == self.total
        return {
            "records": self.total,
            "ends": {end: self.ends[end] for end in ENDS},
            "reasons": {end: {reason: n for (of, reason), n in sorted(self.reasons.items()) if of == end} for end in ENDS},
            "answers": self.answers,
            "tokens": self.tokens,
        }


def read(raw: Path, shard: int, num_shards: int, cut: str) -> list[Conversation]:
    """Return every num_shards-th record of each raw file, from the shard's first one. Raises ValueError with file and line."""
    found = []
    for name in FILES:
        path = raw.parent / f"{name}.jsonl"
        for line, record in islice(enumerate(jsonl.read(path), 1), shard, None, num_shards):
            try:
                found.append(Conversation((name, line), record, cut))
            except RecordError as error:
                raise ValueError(f"{path}: line {line}: {error}; make the file again") from error
    return found


def make(
    raw: Path, target: Path, tokenizer: Path, settings: Regenerate, part: tuple[int, int], out: Path, ranks: Ranks = ALONE
) -> dict[str, Any]:
    """Answer one shard and write its manifest to `out`; return the manifest. part: (shard, number of shards).

    raw, target, tokenizer: their manifests. ranks: they hold the target together, and the first one writes. Raises ValueError
    if files differ from their manifests, and if too many records failed, which the next job tries again. Answers by other
    settings, of a target with other files, or where records are left by another model are left out, and the log says so.
    """
    shard, num_shards = part
    if ranks.world_size > 1:
        from longspec.models.target import join_ranks

        join_ranks(ranks)
    dataset = checked_manifest(raw)
    folder, (own, of_tokenizer) = Path(checked_folder(target)), load_tokenizer(tokenizer)
    hashes = {"target": (sha256_file(target), target_hash(target)), "tokenizer": (sha256_file(tokenizer), of_tokenizer)}
    made_with = {"dataset": dataset["name"], "settings": json.loads(deciding(settings)), "raw": hashes_of(dataset)}
    made_with |= {"num_shards": num_shards, "shard": shard} | {key: files for key, (_, files) in hashes.items()}
    # A journal that an older longspec began, with the hashes of these manifests, goes on as it is.
    older = made_with | {key: text for key, (text, _) in hashes.items()}
    path, conversations = out.parent / JOURNAL, read(raw, shard, num_shards, settings.cut)
    endpoint = None  # None as long as this job computes, or has not started its server
    if settings.endpoint is not None:
        names = _names_of(target, folder, out.parent.parent, hashes["target"])
        endpoint, begun = client.Client(settings.endpoint, settings, names), _begun_with(path)
        served = {SERVED: begun.get(SERVED)}
        is_alike = begun in (made_with | served, older | served)
        if not is_alike or len(jsonl.whole_lines(path, ())) <= len(conversations):  # else nobody is asked
            served = {SERVED: endpoint.find_model()}
        made_with, older = made_with | served, older | served
    positions = position_limit(read_target_config(folder))
    asker = Asker(own, folder, positions, settings, f"data.{dataset['name']}.regenerate")
    with ExitStack() as alone:
        if ranks.is_main:  # no other job writes here, and no manifest may stand beside a journal that grows
            alone.callback(acquire(out.parent).release)
            out.unlink(missing_ok=True)
        identity, of = older if _begun_with(path) == older else made_with, f"{dataset['name']}'s answers"
        with Journal(path, identity, ranks, of=of, aside=True, keys=COUNTED) as journal:
            tally = _answer(conversations, journal, asker, endpoint, ranks)
        manifest = identity | tally.describe() | {HASHES: hashes}
        if ranks.is_main:
            manifest |= {"files": describe_files(out.parent, [JOURNAL])}
            write_json(out, manifest)
    return manifest


def _begun_with(journal: Path) -> dict[str, Any]:
    """Return the identity in a journal's first line; {} if there is none."""
    with suppress(OSError, ValueError, KeyError, TypeError), journal.open(encoding="utf-8") as lines:
        return dict(json.loads(next(lines, ""))["identity"])
    return {}


def _names_of(target: Path, folder: Path, answers: Path, hashes: tuple[str, str]) -> list[str]:
    """Return the names that a server may have for the target: its source's, its folder's, and those that answered before.

    hashes: those by which a journal may know the target.
    """
    source = str(read_json(target)["source"])
    source = hub_source(source)[0] if source.startswith(HUB_PREFIX) else source
    names = [Path(source).name, "/".join(folder.parts[-2:])]
    for journal in sorted(answers.glob(f"*/{JOURNAL}")):
        made_with = _begun_with(journal)
        names += [made_with[SERVED]] if SERVED in made_with and made_with.get("target") in hashes else []
    return list(dict.fromkeys(names))


def _answer(
    conversations: list[Conversation], journal: Journal, asker: Asker, endpoint: client.Client | None, ranks: Ranks
) -> Tally:
    """Journal each conversation; return the tally. A server that this job starts ends with this call.

    Failed ones come last. A job that ends before that asks them again in its next try; a whole shard asks nobody.
    """
    settings, lines, failed = asker.settings, journal.lines or [], list[dict[str, Any]]()
    done = {(name, number) for name, number in (line["record"] for line in lines)}
    tally = Tally(len(conversations), lines)
    left = [each for each in conversations if each.key not in done]
    log(f"{len(conversations):,} records, {len(done):,} of them done", ranks)
    answered: Iterator[list[Conversation]] = iter(())
    with ExitStack() as stack:
        if settings.engine != ENDPOINT:
            from longspec.answers import local  # torch, which no server needs

            answered = local.answered(conversations, done, asker, ranks)
        elif left:  # else a server would be started for nothing
            if endpoint is None:
                printed = journal.path.with_name(PRINTED)
                started = server.started(settings.server or "", asker.target, settings.server_minutes, printed)
                endpoint = client.Client(stack.enter_context(started), settings)
                endpoint.find_model()
            answered = stack.enter_context(closing(client.answered(left, endpoint, asker)))
        for together in answered:
            for each in together:
                line = each.line()
                (failed.append if line["end"] == FAILED else journal.append)(line)
                tally.count(line)
                each.history, each.ids = [], []  # all answers of a shard would need much memory
            tally.tell(PROGRESS_SECONDS)
            tally.check(settings.max_failed)
    for line in failed:
        journal.append(line)
    journal.sync()
    if ranks.is_main:
        tally.tell()
    return tally
