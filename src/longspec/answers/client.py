"""An OpenAI-compatible server as the engine, asked many conversations at once. The package openai sends and retries."""

import os
from collections.abc import Collection, Generator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import openai
from pydantic import AliasPath, BaseModel, Field, NonNegativeInt, ValidationError

from longspec.answers.conversation import Answer, Asker, Conversation
from longspec.answers.settings import JOURNAL, Regenerate
from longspec.data.chat.special_tokens import LayoutError
from longspec.data.read.records import Chat
from longspec.distributed import log
from longspec.shown import brief

KEY = "OPENAI_API_KEY"  # the environment variable of the server's key
NO_KEY = "EMPTY"  # sent to a server without a key, since openai asks for one; vLLM's examples send it too
HOPELESS = {401, 403, 404, 405}  # HTTP codes that every request would get
FINISHED, CUT, CALLED = "stop", "length", "tool_calls"
OF_A_FUNCTION = ("name", "description", "parameters")  # vLLM lays them out in this order, null where one is missing
ALSO_OF_A_FUNCTION = ("strict", "defer_loading")  # these follow where they are given; nothing else


class FailedError(Exception):
    """Say why one request has no answer."""


class HopelessError(ValueError):
    """Say why no request will have an answer."""


def _at(first: str, *more: str | int) -> Any:
    """Return the place of a reply's field that may be left out."""
    return Field(None, validation_alias=AliasPath(first, *more))


class Reply(BaseModel):
    """Hold what is read of the reply to POST chat/completions. A thought has its own field, under one of two names."""

    finish_reason: str = Field(validation_alias=AliasPath("choices", 0, "finish_reason"))
    content: str | None = Field(validation_alias=AliasPath("choices", 0, "message", "content"))
    reasoning_content: str | None = _at("choices", 0, "message", "reasoning_content")
    reasoning: str | None = _at("choices", 0, "message", "reasoning")
    tool_calls: list[Any] | None = _at("choices", 0, "message", "tool_calls")
    token_ids: list[NonNegativeInt] | None = _at("choices", 0, "token_ids")
    completion_tokens: NonNegativeInt | None = _at("usage", "completion_tokens")
    prompt_tokens: NonNegativeInt | None = _at("usage", "prompt_tokens")


def server_key() -> str:
    """Return the server's key, "" for none. Raises ValueError for one that no header holds: HTTP's error would show the key."""
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"{KEY}: holds a character that no HTTP header takes; set it to the server's key")
    return key


def _shown(value: object) -> str:
    """Return what a server said, short and without the key, which some servers repeat."""
    text, key = str(value), server_key()
    return brief(text.replace(key, f"${KEY}") if key else text)


class Client:
    """Ask the server at an address such as http://host:8000/v1, which serves `model`.

    target: names that the server may have for the target; None for a server that this job started here.
    """

    def __init__(self, address: str, settings: Regenerate, target: Collection[str] | None = None) -> None:
        self.address, self.settings, self.target = address.rstrip("/"), settings, target
        self.model = settings.served_model or ""
        self.is_vllm = False  # vLLM takes parameters of its own; other servers may refuse them
        self._server = openai.OpenAI(
            base_url=self.address,
            api_key=server_key() or NO_KEY,
            max_retries=settings.tries - 1,
            timeout=settings.seconds,
            http_client=openai.DefaultHttpxClient(trust_env=target is not None),  # no proxy knows a server of this machine
        )

    def find_model(self) -> str:
        """Find the name of the served model, ask it from now on, and return it.

        Raises ValueError unless the server lists the settings' served_model or, without that, the target alone.
        """
        try:
            owners = {each.id: getattr(each, "owned_by", None) for each in self._server.models.list().data}
        except (openai.OpenAIError, AttributeError, TypeError, ValueError) as error:  # the last three: the reply is no list
            raise ValueError(f"{self.address}: lists no models: {_shown(error)}; give the address with its /v1") from None
        names = [*owners]
        self.is_vllm = "vllm" in owners.values()
        wanted = self.settings.served_model
        if wanted not in names and (wanted or len(names) != 1):
            raise ValueError(f"{self.address}: serves {', '.join(names) or 'no model'}; set regenerate.served_model")
        self.model = wanted or names[0]
        parts = Path(self.model).parts
        if not (wanted or self.target is None or {self.model, *parts[-1:], "/".join(parts[-2:])}.intersection(self.target)):
            raise ValueError(
                f"{self.address}: serves {self.model}, and the target is {' or '.join(self.target)}; serve the target there, "
                f"or set regenerate.served_model to {self.model} if that is the target under another name"
            )
        return self.model

    def ask(self, chat: Chat, seed: int, length: int) -> Answer:
        """Return the answer to a conversation, which the target's own chat template lays out in `length` tokens.

        Raises FailedError if this request has no answer, HopelessError if none will have one.
        """
        reply = self._reply(self._body(chat, seed))
        if reply.prompt_tokens not in (None, length):
            raise HopelessError(
                f"{self.address}: has read a question as {reply.prompt_tokens} tokens (usage.prompt_tokens), which the "
                f"target's own chat template lays out in {length}: correct regenerate.endpoint, server or served_model, or "
                f"serve the target with its own chat template; remove the shard's {JOURNAL} if it holds such answers"
            )
        if reply.finish_reason not in (FINISHED, CUT, CALLED):
            raise FailedError(f"{self.address}: finish_reason {reply.finish_reason!r}")
        return Answer(
            reply.content or "",
            reply.completion_tokens or 0,
            cut=reply.finish_reason == CUT,
            fault="it calls a tool, which the server keeps apart" if reply.tool_calls else "",
            thought=reply.reasoning_content or reply.reasoning or "",
            ids=tuple(reply.token_ids) if reply.token_ids else None,
        )

    def _body(self, chat: Chat, seed: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "messages": chat.messages, "max_tokens": self.settings.new_tokens}
        body |= {"temperature": self.settings.temperature, "top_p": self.settings.top_p}
        if self.settings.temperature:
            body["seed"] = seed
        if self.is_vllm:  # returns the answer's tokens; special ones stay in its text, such as a thought's marks
            body |= {"return_token_ids": True, "skip_special_tokens": False}
        if chat.tools:
            body |= {"tools": chat.tools, "tool_choice": "none"}  # laid out, and a call in the answer stays text
        if chat.template_arguments:
            body["chat_template_kwargs"] = chat.template_arguments
        return body

    def _reply(self, body: dict[str, Any]) -> Reply:
        """Return the server's reply; openai retries where that may help. Raises FailedError, HopelessError."""
        try:
            return Reply.model_validate_json(self._server.post("chat/completions", cast_to=str, body=body), strict=True)
        except openai.APIStatusError as error:
            if error.status_code in HOPELESS:
                fix = f"correct regenerate.endpoint or served_model, or set {KEY}"
                raise HopelessError(f"{self.address}: {_shown(error)}; {fix}") from None
            raise FailedError(f"{self.address}: {_shown(error)}") from None
        except openai.APITimeoutError:
            fix = "see whether the server answers at all, or raise regenerate.timeout"
            raise FailedError(f"{self.address}: no answer in time; {fix}") from None
        except openai.APIConnectionError as error:
            raise FailedError(f"{self.address}: {_shown(f'{error} {error.__cause__}')}") from None
        except ValidationError as error:
            fault = error.errors()[0]
            where = ".".join(map(str, fault["loc"])) or "all of it"
            raise FailedError(f"{self.address}: its reply: {where}: {_shown(fault['msg'])}") from None


def answered(conversations: list[Conversation], client: Client, asker: Asker) -> Generator[list[Conversation], None, None]:
    """Yield each conversation, answered or failed, as it ends, in a list. Raises HopelessError for what would fail them all."""
    log(f"{client.address}: asking {client.model}, {client.settings.requests} at a time")
    pool = ThreadPoolExecutor(client.settings.requests)
    try:
        for future in as_completed([pool.submit(_answer, each, client, asker) for each in conversations]):
            yield [future.result()]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _as_vllm_lays_out(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a record's tools with the fields that vLLM (0.32) gives the chat template."""
    found = []
    for function in (tool["function"] for tool in tools):
        also = {name: function[name] for name in ALSO_OF_A_FUNCTION if function.get(name) is not None}
        found.append({"type": "function", "function": {name: function.get(name) for name in OF_A_FUNCTION} | also})
    return found


def _answer(conversation: Conversation, client: Client, asker: Asker) -> Conversation:
    """Ask turn by turn until the conversation ends, and return it."""
    if client.is_vllm and conversation.asked.tools:  # the draft then learns behind what the target has read
        conversation.offer(_as_vllm_lays_out(conversation.asked.tools))
    while not conversation.end:
        if asker.prompts([conversation])[0] is None:
            continue
        try:
            seed, length = conversation.seed(client.settings.seed), len(asker.encoder.as_sent(conversation.asked))
            conversation.take(asker.without_control(client.ask(conversation.asked, seed, length)))
        except LayoutError as error:
            conversation.refuse(str(error))
        except FailedError as error:
            conversation.fail(str(error))
    return conversation
