"""Decode one request at a time with llama.cpp's server, from the package xllamacpp. Only this module uses llama.cpp.

    python -m longspec.measure.engines.llama_cpp JOB        in an environment that has xllamacpp

The server runs in this process, and ends it if it aborts. After each token its stream reports how many drafts were made and
kept so far in this request. The rounds are derived from these numbers, and checked against its counters by position.
"""

import http.client
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, product
from typing import Any
from urllib.parse import urlsplit

from longspec.measure.engines.protocol import Answer, Job, Request, cut, run, within

PACKAGE = "xllamacpp"
INSTALL = "install the one of serve/llama.cpp.txt, by `make .venv-serve/llama.cpp/.stamp`"
# Its threads spin while they wait and slow down everything else that runs, so it gets one unless the user sets more.
THREADS = "OMP_NUM_THREADS"
ERRORS_ALONE = 1  # log level: it prints errors only
KEPT = re.compile(r'^llamacpp:spec_decode_num_accepted_tokens_per_pos_total\{position="(\d+)"\} (\d+)$', re.MULTILINE)
LOOKUP_NGRAM = 3  # tokens that must occur earlier in the text; decode.lookup.LookupDrafter takes these or fewer
MOST_TRIED = 100_000  # most ways tried to split kept drafts into rounds


@dataclass(frozen=True)
class Engine:
    """Hold a running server. tokens: drafted in each round, 0 without draft; draft: its file, None without one."""

    server: Any
    tokens: int
    draft: str | None = None


@dataclass(frozen=True)
class Event:
    """Hold what the server's stream reports at a token: tokens, drafts made and kept so far, seconds since the first token."""

    tokens: int
    drafted: int
    kept: int
    seconds: float


def load(job: Job) -> Engine:
    """Start the server. Raises RuntimeError if it refuses."""
    import xllamacpp

    return Engine(xllamacpp.Server(_settings(job, xllamacpp)), job.tokens if job.method else 0, job.draft)


def _settings(job: Job, xllamacpp: Any) -> Any:
    """Return the parameters of a server for one request at a time."""
    settings = xllamacpp.CommonParams()
    threads = int(os.environ.get(THREADS) or 1)
    settings.model.path = job.model
    settings.n_ctx = job.positions + job.tokens + 2  # it stops drafting two tokens before its end
    settings.n_parallel = 1
    settings.fit_params = settings.warmup = settings.ctx_shift = settings.ui = False
    settings.cache_ram_mib = 0
    settings.endpoint_metrics = True
    settings.verbosity = ERRORS_ALONE
    draft = settings.speculative.draft
    for each in (settings.cpuparams, settings.cpuparams_batch, draft.cpuparams, draft.cpuparams_batch):
        each.n_threads = threads
    if job.dtype == "float32":  # else it stores keys and values in float16, and its flash attention rounds to float16
        settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        for each in (settings, draft):
            each.cache_type_k = each.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    if job.method is not None:
        kind = f"COMMON_SPECULATIVE_TYPE_{job.method.upper().replace('-', '_')}"
        settings.speculative.types = [getattr(xllamacpp.common_speculative_type, kind)]
        draft.n_max, draft.n_min, draft.p_min = job.tokens, 0, 0.0
        lookup = settings.speculative.ngram_simple  # ngram_simple does not read n_max
        lookup.size_n, lookup.size_m = LOOKUP_NGRAM, job.tokens
        if job.draft is not None:
            draft.mparams.path = job.draft
    return settings


def answer(engine: Engine, request: Request, repeats: int) -> Answer:
    """Decode a request greedily.

    The server is asked for one round more than needed, since its last rounds draft no further than the text may go. Raises
    ValueError if its stream and its counters disagree, and if it silently decodes without the draft.
    """
    body = {
        "prompt": request.prompt,
        "n_predict": request.max_tokens + engine.tokens,
        "temperature": 0,
        "cache_prompt": False,  # prompts share no work, so that each one's seconds are its own
        "return_tokens": True,
    }
    before = _kept_by_place(engine)
    seen, events = _streamed(engine, body)
    if engine.draft and events[-1].tokens > 1 and not events[-1].drafted:
        raise ValueError(f"evaluation.engine: llama.cpp: decodes without {engine.draft}")
    counted = [now - earlier for now, earlier in zip(_kept_by_place(engine), before, strict=True)]
    others = [_streamed(engine, body)[1] for _ in range(repeats - 1)]
    text, likeliest = seen, list[dict[str, Any]]()
    if request.best or len(seen) < events[-1].tokens:  # the stream omits tokens that end within a character
        with _asked(engine, "POST", "/completion", body | ({"n_probs": request.best} if request.best else {})) as reply:
            whole = json.loads(reply.read())
        text, likeliest = whole["tokens"], whole.get("completion_probabilities", [])
        behind = iter(text)
        if lost := [token for token in seen if token not in behind]:  # each is searched after the one before
            raise ValueError(f"{request.id}: llama.cpp's text lacks {lost} when it is asked again; {INSTALL}")
    kept = rounds_of(events, engine.tokens, counted)
    text = cut(text, request)
    return Answer(
        id=request.id,
        tokens=text,
        accepted=within(kept, len(text)),
        seconds=[next(event.seconds for event in each if event.tokens >= len(text)) for each in (events, *others)],
        best=list(_best(text, likeliest)) if request.best else [],
    )


def rounds_of(events: list[Event], chain: int, counted: list[int]) -> list[int]:
    """Return the drafts kept in each round, without the prompt's step. counted: the server's counters by position.

    The stream is silent within a character. The total that several rounds in such a silence kept is split so that the result
    agrees with the counters. Raises ValueError if no split does.
    """
    ways: list[list[tuple[int, ...]]] = []
    last = Event(1, 0, 0, 0.0)  # the end of the last round that was read
    for event in events:
        new, drafted, kept = event.tokens - last.tokens, event.drafted - last.drafted, event.kept - last.kept
        if new <= 0:  # still the same round
            continue
        rounds = max(1, -(-drafted // chain) if chain else 0, new - kept)
        ways.append(list(_ways(rounds, kept, chain, new)))
        last = Event(last.tokens + rounds + kept, event.drafted, event.kept, event.seconds)
    for way in islice(product(*ways), MOST_TRIED):
        found = [kept for rounds in way for kept in rounds]
        if [sum(kept > place for kept in found) for place in range(chain)] == counted:
            return found
    raise ValueError(f"llama.cpp counted {counted} kept drafts by position, its stream gives others; {INSTALL}")


def _ways(rounds: int, kept: int, chain: int, new: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways `rounds` rounds can keep `kept` drafts, with the last one reaching the text's `new`th token from here."""
    for way in product(range(min(chain, kept) + 1), repeat=rounds):
        if sum(way) == kept and sum(way[:-1]) + rounds - 1 < new:
            yield way


def _best(text: list[int], likeliest: list[dict[str, Any]]) -> Iterator[list[tuple[int, float]]]:
    """Yield the likeliest tokens at each place with their log probabilities, whose differences are those of the logits.

    The server omits a token that ends within a character; then the token itself is all that is known.
    """
    left = iter(likeliest)
    place = next(left, None)
    for token in text:
        if place is None or place["id"] != token:
            yield [(token, 0.0)]
            continue
        yield [(each["id"], each["logprob"]) for each in place["top_logprobs"]]
        place = next(left, None)


def _kept_by_place(engine: Engine) -> list[int]:
    """Return the server's counters of kept drafts by position; zeros before the first draft."""
    with _asked(engine, "GET", "/metrics", None) as reply:
        found = {int(place): int(count) for place, count in KEPT.findall(reply.read().decode())}
    return [found.get(place, 0) for place in range(engine.tokens)]


def _streamed(engine: Engine, body: dict[str, Any]) -> tuple[list[int], list[Event]]:
    """Return the tokens that the stream names, and an event for each of its messages."""
    tokens: list[int] = []
    events: list[Event] = []
    with _asked(engine, "POST", "/completion", body | {"stream": True, "timings_per_token": True}) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                content = json.loads(line.removeprefix(b"data: "))
                tokens += content["tokens"]
                times = content["timings"]
                drafts = (times.get("draft_n", 0), times.get("draft_n_accepted", 0))
                events.append(Event(times["predicted_n"], *drafts, times["predicted_ms"] / 1000))
    return tokens, events


def _asked(engine: Engine, verb: str, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
    """Send a request to the server, past any proxy. Raises ValueError with the server's words if it refuses."""
    connection = http.client.HTTPConnection(urlsplit(engine.server.listening_address).netloc)
    content = None if body is None else json.dumps(body)
    connection.request(verb, path, content, {"Content-Type": "application/json", "Connection": "close"})
    reply = connection.getresponse()
    if reply.status != http.client.OK:
        raise ValueError(f"llama.cpp answers {path} with {reply.status}: {reply.read().decode(errors='replace')[:300]}")
    return reply


if __name__ == "__main__":
    run((PACKAGE,), load, answer)
