"""The settings in `data.<name>.regenerate` of config/workflow.yaml. No torch: the plan reads them."""

import json
import shlex
import shutil
from dataclasses import asdict, dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from longspec.atomic_files import sha256_text
from longspec.config.schema import PRECISIONS, Known
from longspec.config.typed import Filled, Number, Rate, Seed, Share, Temperature, Text, Tokens, Whole, means, words

LOCAL, ENDPOINT = "transformers", "endpoint"
KEEP, DROP = "keep", "drop"
HASH_LETTERS = 8
BATCH_TOKENS = 2**16  # of prompts and answers with padding, in the cache at a time; one row alone may have more
SHORTEST_WAIT, SLOWEST = 600.0, 5.0  # the default timeout: seconds at least, and tokens of an answer a second
# In a shard's folder: a line for each finished record; the output of a server that the job started. Keys of its manifest:
# the name that its server has for the model; for target and tokenizer the hash of the manifest's text, which an older longspec
# compared, and the hash of the manifest's files.
JOURNAL, PRINTED, SERVED, HASHES = "journal.jsonl", "server.log", "served_model", "hashes"
# Keys that change how answers are made, not the answers. All other keys name the folder of the answers.
RUNTIME = ("max_failed", "batch", "endpoint", "server", "server_minutes", "requests", "tries", "timeout")
ONLY = {
    "precision": LOCAL,
    "batch": LOCAL,
    **dict.fromkeys(("endpoint", "server", "server_minutes", "served_model", "requests", "tries", "timeout"), ENDPOINT),
}


def _checked_address(text: str) -> str:
    """Return an address. Raises ValueError for a port above 65535, and for brackets around anything but an IPv6 address."""
    _ = urlsplit(text).port
    return text


Address = Annotated[
    Text,
    Field(pattern=r"^https?://[^\s@/:][^\s@/]*(/[^\s@]*)?$", title="an address such as http://host:8000/v1"),
    AfterValidator(_checked_address),
]


@dataclass(frozen=True)
class Regenerate(Known):
    """How the target answers. Which keys go together: parse; what they mean for users: docs/answers.md."""

    new_tokens: Annotated[Tokens, means("the number of tokens of an answer at most")]
    temperature: Annotated[Temperature, means("0 for greedy, or what the target's logits are divided by")] = 0.0
    top_p: Annotated[Rate, means("the share of the probability that is drawn from, 1 for all")] = 1.0
    seed: Annotated[Seed, means("the seed of random draws")] = 0
    longest_prompt: Annotated[
        Tokens | None, means("the tokens of a prompt at most, or null for as many as leave room for new_tokens")
    ] = None
    cut: Annotated[str, words(KEEP, DROP), means("what is done with answers that new_tokens cuts")] = DROP
    engine: Annotated[str, words(LOCAL, ENDPOINT), means("what answers: a job of this workflow, or a server")] = LOCAL
    precision: Annotated[str, words(*PRECISIONS), means("the target's precision; fastest: bf16 on processors too")] = "auto"
    served_model: Annotated[Filled | None, means("the name that the server has for the target")] = None
    max_failed: Annotated[Share, means("the share of failed records above which the job fails, for instance 0.01")] = 0.01
    batch: Annotated[Whole, Field(ge=1, le=2**16), means("the number of conversations that are answered at a time")] = 16
    endpoint: Annotated[
        Address | None, means("the address of an OpenAI-compatible server; its key is the environment's OPENAI_API_KEY")
    ] = None
    server: Annotated[Filled | None, means("the command that serves the target, with {model} and {port} in it")] = None
    server_minutes: Annotated[Number, Field(gt=0, le=1440), means("the minutes in which the server must begin to answer")] = 30
    requests: Annotated[Whole, Field(ge=1, le=1000), means("the number of requests at a time")] = 32
    tries: Annotated[Whole, Field(ge=1, le=100), means("the tries of a request")] = 6
    timeout: Annotated[
        Number | None,
        Field(gt=0, le=86400),
        means("the seconds that a request may take; null: 600, or a fifth of new_tokens if that is more"),
    ] = None

    @property
    def seconds(self) -> float:
        """Return the seconds after which a request without a whole answer is tried again."""
        return self.timeout or max(SHORTEST_WAIT, self.new_tokens / SLOWEST)


def parse(name: str, given: dict[str, Any]) -> Regenerate:
    """Return the settings of dataset `name`. Raises ValueError, with the key, if they do not go together."""
    key = f"data.{name}.regenerate"
    # 0 and 0.0 are one temperature and must name one folder.
    settings = Regenerate(**given | {each: float(given[each]) for each in ("temperature", "top_p") if each in given})
    for each in given:
        if ONLY.get(each, settings.engine) != settings.engine:
            raise ValueError(
                f"{key}.{each}: is of engine: {ONLY[each]}, but the engine is {settings.engine}; remove it, or set {key}.engine"
            )
    if settings.engine == ENDPOINT:
        _check_place(key, settings)
    return settings


def _check_place(key: str, settings: Regenerate) -> None:
    """Raise ValueError unless the settings give either a running server's address or a command that can start one."""
    if (settings.endpoint is None) == (settings.server is None):
        raise ValueError(
            f"{key}: engine: {ENDPOINT} needs either endpoint (http://host:8000/v1, where the target is served) or server (the "
            f"command that serves it), not {'both' if settings.endpoint else 'neither'}"
        )
    if settings.server is None:
        return
    try:
        words = shlex.split(settings.server)
    except ValueError as error:
        raise ValueError(f"{key}.server: {settings.server}: {error}; correct its quotes") from None
    if missing := [place for place in ("{model}", "{port}") if place not in settings.server]:
        raise ValueError(
            f"{key}.server: lacks {' and '.join(missing)}, in whose place the target's folder and a free port are put: "
            "docs/answers.md has a command"
        )
    if any(word.split("=")[0] == "--api-key" for word in words):
        raise ValueError(
            f"{key}.server: --api-key would stand in logs; set the variables VLLM_API_KEY, which vLLM reads, and OPENAI_API_KEY"
        )
    # A bare name may exist on the GPU nodes only.
    if "/" in words[0] and shutil.which(words[0]) is None:
        raise ValueError(f"{key}.server: {words[0]}: no such program; `make .venv-serve/vllm/.stamp` installs vLLM's")


def room_for_prompts(settings: Regenerate, positions: int, key: str) -> int:
    """Return the most tokens of a prompt, of the target's `positions`. Raises ValueError if the settings do not fit them."""
    room = positions - settings.new_tokens
    if room < 1:
        raise ValueError(
            f"{key}.new_tokens: {settings.new_tokens} leave no room for a prompt in the target's {positions} positions; "
            "lower it"
        )
    if settings.longest_prompt is not None and settings.longest_prompt > room:
        raise ValueError(
            f"{key}.longest_prompt: {settings.longest_prompt} and {settings.new_tokens} new tokens do not fit the target's "
            f"{positions} positions; {room} is the most"
        )
    return room


def deciding(settings: Regenerate) -> str:
    """Return the settings that decide the answers, as canonical JSON, without the other engine's keys."""
    return json.dumps({name: value for name, value in _given(settings) if name not in RUNTIME}, sort_keys=True)


def runtime(settings: Regenerate) -> str:
    """Return the settings that change no answer, as canonical JSON, without the other engine's keys."""
    return json.dumps({name: value for name, value in _given(settings) if name in RUNTIME}, sort_keys=True)


def _given(settings: Regenerate) -> list[tuple[str, Any]]:
    values = asdict(settings).items()
    return [(name, value) for name, value in values if value is not None and ONLY.get(name, settings.engine) == settings.engine]


def folder_name(settings: Regenerate) -> str:
    """Return the name of the folder of answers by these settings, below the folders of target and dataset."""
    how = "greedy" if settings.temperature == 0 else f"t{settings.temperature:g}"
    return f"{how}-{settings.new_tokens}-{sha256_text(deciding(settings))[:HASH_LETTERS]}"
