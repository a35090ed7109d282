"""An OpenAI-compatible server as the engine: many conversations at once, a request tried again where that helps."""

import http.client
import json
import os
import random
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from threading import Event
from typing import Any

from longspec.answers.conversation import Answer, Conversation
from longspec.answers.questions import Asker
from longspec.answers.settings import Regenerate
from longspec.data.chat.special_tokens import LayoutError
from longspec.data.read.conversations import Chat
from longspec.distributed import log
from longspec.shown import brief

KEY = "OPENAI_API_KEY"  # the environment variable of the server's key
PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before the second try, and before any
AGAIN = {408, 409, 425, 429, 500, 502, 503, 504}
HOPELESS = {401, 403, 404, 405}  # what one request gets all get
# No answer, or none that can be read; JSON may be nested deeper than Python reads.
BROKEN = (urllib.error.URLError, http.client.HTTPException, OSError, ValueError, RecursionError)
REPLY_BYTES, TOKEN_BYTES = 2**20, 256  # that a reply may have, and for each token that it was asked for
FINISHED, CUT, CALLED = "stop", "length", "tool_calls"
THOUGHTS = ("reasoning_content", "reasoning")  # under which servers put a thought apart from the content


class FailedError(Exception):
    """One request has no answer; the message says why."""


class HopelessError(ValueError):
    """No request will have one."""


class OtherPromptError(HopelessError):
    """The server lays questions out otherwise than the target's chat template does."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The key is for one server: an answer that names another one is an error."""

    def redirect_request(self, *_: Any) -> None:
        return None


def server_key() -> str:
    """Return the server's key without white space around it, "" for none. Raise ValueError for one that no header can hold."""
    key = os.environ.get(KEY, "").strip()
    if not all("!" <= letter <= "~" for letter in key):
        raise ValueError(
            f"{KEY}: holds white space or a character outside ASCII, which no HTTP header takes; set it to the server's key"
        )
    return key


def _shown(value: object) -> str:
    """Return what a server said, short, without the key: some servers repeat it."""
    text, key = str(value), server_key()
    return brief(text.replace(key, f"${KEY}") if key else text)


class Client:
    """The server at an address such as http://host:8000/v1, which serves `model`; own: this job has started it here."""

    def __init__(self, address: str, settings: Regenerate, *, own: bool = False) -> None:
        self.address, self.settings, self.stopped = address.rstrip("/"), settings, Event()
        self._key = server_key()
        # A proxy of the environment knows no server of this machine.
        proxies = [urllib.request.ProxyHandler({})] if own else []
        self._open = urllib.request.build_opener(_NoRedirect, *proxies).open
        self.model = settings.served_model or ""
        self._is_compared = True
        self._tells_ids = False  # vLLM says the tokens of an answer; other servers may refuse to be asked

    def find_model(self) -> str:
        """Ask for the name of the served model, which is then asked. Raises ValueError where it is not the only one."""
        try:
            models = self.send("models", None)["data"]
            names = [_shown(each["id"]) for each in models]
            self._tells_ids = any(each.get("owned_by") == "vllm" for each in models)
        except FailedError as error:
            reason = str(error).removeprefix(f"{self.address}: ")
            raise ValueError(f"{self.address}: does not answer: {reason}") from None
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.address}/models: is no list of models; give the address with its /v1") from error
        wanted = self.settings.served_model
        if wanted not in names and (wanted or len(names) != 1):
            raise ValueError(
                f"{self.address}: serves {', '.join(names) or 'no model'}; set regenerate.served_model to the target's name"
            )
        self.model = wanted or names[0]
        return self.model

    def ask(self, chat: Chat, seed: int, length: int) -> Answer:
        """The answer to a conversation, which the target's chat template lays out in so many tokens.

        Raises FailedError, HopelessError.
        """
        told = self.send("chat/completions", self._body(chat, seed))
        try:
            choice, usage = told["choices"][0], told.get("usage") or {}
            message, finish = choice["message"], choice["finish_reason"]
            text, tokens, read = message["content"], usage.get("completion_tokens"), usage.get("prompt_tokens")
            thought = next((message[name] for name in THOUGHTS if message.get(name)), "")
            ids = choice.get("token_ids")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise self._failed(f"no answer of a chat: {told}") from None
        for name, value, most in (("completion_tokens", tokens, self.settings.new_tokens), ("prompt_tokens", read, 2**31)):
            if value is not None and not (type(value) is int and 0 <= value <= most):
                raise self._failed(f"usage.{name}: {value!r} is no count of at most {most} tokens")
        for name, value in (("content", text), ("thought", thought)):
            if not isinstance(value, str | None):
                raise self._failed(f"{name}: {value!r} is no text")
        if not isinstance(ids, list | None) or not all(type(token) is int and token >= 0 for token in ids or ()):
            raise self._failed(f"token_ids: {ids!r} are no tokens")
        self._compare(read, length)
        if finish not in (FINISHED, CUT, CALLED):
            raise self._failed(f"finish_reason {finish!r}")
        fault = "it calls a tool, which the server keeps apart" if message.get("tool_calls") else ""
        return Answer(text or "", tokens or 0, cut=finish == CUT, fault=fault, thought=thought, ids=tuple(ids) if ids else None)

    def _failed(self, reason: str) -> FailedError:
        """Return the error of one request, with the address and without the key."""
        return FailedError(f"{self.address}: {_shown(reason)}")

    def _body(self, chat: Chat, seed: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "messages": chat.messages, "max_tokens": self.settings.new_tokens}
        body |= {"temperature": self.settings.temperature, "top_p": self.settings.top_p}
        if self.settings.temperature:
            body["seed"] = seed
        if self._tells_ids:
            body["return_token_ids"] = True
        if chat.tools:
            body |= {"tools": chat.tools, "tool_choice": "none"}  # laid out, and a call in the answer stays text
        if chat.template_arguments:
            body["chat_template_kwargs"] = chat.template_arguments
        return body

    def _compare(self, read: Any, length: int) -> None:
        """Raise OtherPromptError where the server has read a question in another number of tokens than the target would."""
        if isinstance(read, int) and read != length:
            raise OtherPromptError(
                f"{self.address}: has read a question as {read} tokens (usage.prompt_tokens), which the target's own chat "
                f"template lays out in {length}: it serves another model, or lays questions out otherwise; correct "
                "regenerate.endpoint, server or served_model, or serve the target's folder with the chat template that is in it"
            )
        if not isinstance(read, int) and self._is_compared:
            self._is_compared = False
            log(
                f"{self.address}: tells no usage.prompt_tokens, so nobody sees whether it lays questions out as the target does"
            )

    def send(self, path: str, body: dict[str, Any] | None) -> Any:
        """The server's answer to a POST of `body`, or to a GET without one; asked again where that may help."""
        reason, wish = "", None  # why there is no answer yet, and how long the server wants to be left alone
        for number in range(self.settings.tries):
            if number:
                self._wait(number, wish)
            try:
                with self._open(self._request(path, body), timeout=self.settings.timeout) as response:
                    return json.loads(self._whole(response))
            except urllib.error.HTTPError as error:
                with error:
                    reason, wish = _words(error), error.headers.get("Retry-After")
                if error.code in HOPELESS:
                    raise HopelessError(
                        f"{self.address}/{path}: {reason}; correct regenerate.endpoint or served_model, or set {KEY}"
                    ) from None
                if error.code not in AGAIN:
                    raise self._failed(reason) from None
            except BROKEN as error:
                reason, wish = f"{type(error).__name__}: {_shown(getattr(error, 'reason', error))}", None
        raise self._failed(f"{reason} ({self.settings.tries} tries)")

    def _whole(self, response: Any) -> bytes:
        """Return a reply's bytes. Raise FailedError for more of them than a reply of so many tokens has."""
        most = REPLY_BYTES + TOKEN_BYTES * self.settings.new_tokens
        if len(found := response.read(most + 1)) > most:
            raise self._failed(f"a reply of more than {most:,} bytes, where {self.settings.new_tokens} tokens were asked for")
        return bytes(found)

    def _request(self, path: str, body: dict[str, Any] | None) -> urllib.request.Request:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        return urllib.request.Request(f"{self.address}/{path}", data, headers)

    def _wait(self, number: int, wish: str | None) -> None:
        """Pause before a try, longer each time unless the server said how long. Raises FailedError when all is over."""
        pause = min(LONGEST_PAUSE, PAUSE * 2 ** (number - 1)) * random.uniform(0.5, 1.5)
        if wish is not None and wish.isdecimal():
            pause = min(LONGEST_PAUSE, float(wish))
        if self.stopped.wait(pause):
            raise FailedError("the job ends")


def _words(error: urllib.error.HTTPError) -> str:
    """A status with the server's own words."""
    try:
        text = error.read(4096).decode(errors="replace")
    except BROKEN:
        text = ""
    try:
        told = json.loads(text)
        inner = told.get("error", told)
        text = inner.get("message", text) if isinstance(inner, dict) else str(inner)
    except (ValueError, AttributeError, RecursionError):
        pass
    return f"HTTP {error.code}: {_shown(text or error.reason)}"


def answered(conversations: list[Conversation], client: Client, asker: Asker) -> Iterator[list[Conversation]]:
    """All conversations, answered or failed, as they end. Raises HopelessError for what would fail them all."""
    pool = ThreadPoolExecutor(client.settings.requests)
    try:
        rest = iter(conversations)
        waiting: set[Future[Conversation]] = set()
        while True:
            # Few wait in the pool: what stands in it is not taken back when the job ends.
            while len(waiting) < 2 * client.settings.requests and (each := next(rest, None)) is not None:
                waiting.add(pool.submit(_answer, each, client, asker))
            if not waiting:
                return
            ended, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            yield [future.result() for future in ended]
    finally:
        client.stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)


def _answer(conversation: Conversation, client: Client, asker: Asker) -> Conversation:
    """Ask turn by turn, to the end."""
    while not conversation.end:
        if asker.prompts([conversation])[0] is None:
            continue
        try:
            seed, length = conversation.seed(client.settings.seed), asker.sent_length(conversation.asked)
            conversation.take(asker.without_control(client.ask(conversation.asked, seed, length)))
        except LayoutError as error:
            conversation.refuse(str(error))
        except FailedError as error:
            conversation.fail(str(error))
    return conversation
