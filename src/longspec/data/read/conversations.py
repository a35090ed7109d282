"""Conversations of records, checked and brought into the form that chat templates read.

Messages are written as role/content (OpenAI, tulu) or from/value (ShareGPT). Of a message only what a chat template lays out
is read, and what would be lost is a fault: refusals, audio, parts that are not text. A conversation begins with a user's
message (after system messages), since some templates refuse another and nothing asked for it.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from longspec.data.read import thoughts
from longspec.data.read.record_checks import UNANSWERED_FIX, RecordError, check_characters, check_text, kind, says_nothing
from longspec.data.read.tool_calls import read_calls, read_template_arguments, read_tools

CALL = "function_call"  # whose value is the call itself, as LLaMA-Factory writes ShareGPT's messages
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    CALL: "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names of a message's reasoning; the first is ours
CALLS = ("tool_calls", "function_call")  # the second for one call, as OpenAI wrote it first
UNREAD = ("refusal", "audio", "images")  # fields of a message that say something which nobody lays out
# Fields of a record beside its conversation.
BESIDE = ("tools", "chat_template_kwargs", "train_thoughts")


@dataclass(frozen=True)
class Chat:
    """A conversation: each message has `role` (system | user | assistant | tool) and `content`.

    One of the assistant may have `reasoning_content` and `tool_calls`, one of a tool `tool_call_id` and `name`.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_arguments: dict[str, Any] = field(default_factory=dict)
    train_thoughts: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether it is contents alone."""
        return not (self.tools or self.template_arguments) and all(
            message.keys() == {"role", "content"} and message["role"] != "tool" for message in self.messages
        )


def role_of(turn: Any, place: str) -> tuple[str, str]:
    """A message's role (system | user | assistant | tool) and the field that holds its content."""
    if not isinstance(turn, dict):
        raise RecordError(place, f"must be an object, is {kind(turn)}")
    who, what = ("from", "value") if turn.get("from") is not None else ("role", "content")
    role = turn.get(who)
    if not isinstance(role, str) or role not in ROLES:
        raise RecordError(f"{place}.{who}", f"{role!r} is no role that is laid out; known: {', '.join(ROLES)}")
    return ROLES[role], what


def _joined(parts: list[Any], place: str) -> str:
    """The text of a content that is given in parts, as OpenAI's messages may have it."""
    texts = []
    for number, part in enumerate(parts):
        if not isinstance(part, dict):
            raise RecordError(f"{place}[{number}]", f"must be an object, is {kind(part)}")
        if part.get("type") != "text":
            raise RecordError(f"{place}[{number}].type", f"{part.get('type')!r} is not 'text'; nothing else is laid out")
        texts.append(check_characters(part.get("text"), f"{place}[{number}].text"))
    return "".join(texts)


def _message(turn: Any, place: str) -> dict[str, Any]:
    role, what = role_of(turn, place)
    for name in UNREAD if role == "assistant" else (*UNREAD, *CALLS, *THOUGHTS):
        if turn.get(name):
            raise RecordError(f"{place}.{name}", "says something that is not laid out and would be lost")
    content, field = turn.get(what), f"{place}.{what}"
    if isinstance(content, list):
        content = _joined(content, field)
    if role == "assistant":
        return _answer(turn, content, field, place)
    # A system message may be empty, and so may be what a tool returns.
    check = check_text if role == "user" else check_characters
    message = {"role": role, "content": check(content, field)}
    if role == "tool":
        message |= {
            name: check_text(turn[name], f"{place}.{name}") for name in ("tool_call_id", "name") if turn.get(name) is not None
        }
    return message


def _answer(turn: dict[str, Any], content: Any, field: str, place: str) -> dict[str, Any]:
    """A message of the assistant; its content may be missing where it calls tools."""
    given = {name: turn[name] for name in CALLS if turn.get(name)}
    if CALL in (turn.get("from"), turn.get("role")):
        given[field.removeprefix(f"{place}.")], content = check_text(content, field), ""
    if len(given) > 1:
        raise RecordError(f"{place}.{CALLS[1]}", f"stands beside {next(iter(given))}; a message calls its tools in one field")
    calls = [call for name, value in given.items() for call in read_calls(value, f"{place}.{name}")]
    message: dict[str, Any] = {"role": "assistant"}
    message["content"] = check_characters(content or "", field) if calls else check_text(content, field)
    thought = _thought(turn, place)
    return message | ({"reasoning_content": thought} if thought else {}) | ({"tool_calls": calls} if calls else {})


def _thought(turn: dict[str, Any], place: str) -> str:
    """The reasoning of a message, under whichever name it stands; empty without one."""
    thoughts = {check_characters(turn[name], f"{place}.{name}") for name in THOUGHTS if turn.get(name)}
    if len(thoughts) > 1:
        raise RecordError(f"{place}.{THOUGHTS[0]}", f"differs from what stands under another of {', '.join(THOUGHTS)}")
    thought = "".join(thoughts)
    return "" if says_nothing(thought) else thought


def _check_results(messages: list[dict[str, Any]], field: str) -> None:
    """Raises RecordError for a tool's message that answers no call, by its place or by its id."""
    ids: list[str | None] = []
    for number, message in enumerate(messages):
        if message["role"] != "tool":
            ids = [call.get("id") for call in message.get("tool_calls", [])]
            continue
        name = message.get("tool_call_id")
        if not ids or (name is not None and None not in ids and name not in ids):
            raise RecordError(f"{field}[{number}]", "is a tool's message, but no call before it asked for it")


def read_conversation(turns: Any, field: str, unanswered: bool = False) -> Chat:
    """The messages of a field; unanswered: questions alone will do. Raises RecordError with the field at fault."""
    if not isinstance(turns, list) or not turns:
        raise RecordError(field, "must be a list of messages that is not empty")
    messages = [_message(turn, f"{field}[{number}]") for number, turn in enumerate(turns)]
    roles = [message["role"] for message in messages]
    if "assistant" not in roles and not unanswered:
        raise RecordError(field, f"has no assistant message to learn from{UNANSWERED_FIX}")
    if set(roles) == {"system"}:
        raise RecordError(field, "has no user message to answer")
    first = next(number for number, role in enumerate(roles) if role != "system")
    if roles[first] == "assistant":
        raise RecordError(
            f"{field}[{first}]", "begins the conversation as an assistant message that nothing asked for; see start_at"
        )
    _check_results(messages, field)
    return Chat(messages)


def with_beside(record: dict[str, Any], chat: Chat) -> Chat:
    """The conversation with the tools and settings that its record has for it. Raises RecordError with the field at fault."""
    if not any(name in record for name in BESIDE) and chat.is_plain:
        return chat
    trained = record.get("train_thoughts")
    if not isinstance(trained, bool | None):
        raise RecordError("train_thoughts", f"must be true or false, is {kind(trained)}")
    arguments = read_template_arguments(record.get("chat_template_kwargs"))
    whole = Chat(chat.messages, read_tools(record.get("tools")), arguments, trained is not False)
    if whole.is_plain and whole.train_thoughts:
        return whole
    return replace(whole, messages=[_thought_apart(message) for message in whole.messages])


def _thought_apart(message: dict[str, Any]) -> dict[str, Any]:
    """A message with the thought that begins its content (<think> ... </think>) in a field of its own."""
    found = None if message["role"] != "assistant" or "reasoning_content" in message else thoughts.apart(message["content"])
    if found is None:
        return message
    thought, said = found
    apart = message | {"content": said}
    return apart if says_nothing(thought) else apart | {"reasoning_content": thought}
