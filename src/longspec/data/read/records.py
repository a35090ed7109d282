"""The published record formats, checked and turned into running text or a conversation, the form that chat templates read.

A record's fields decide its format; a field that is null counts as missing. In this order:

    source == "arxiv"                        article + abstract, each a text or a list of equal length (or text)
    conversation, conversations or messages  a list of {role, content} (OpenAI, tulu) or {from, value} (ShareGPT)
    problem + qwq                            long chain of thought
    text                                     running text
    target                                   running text after a prompt `source`, which may be empty
    prompt + completion                      a question and its answer: two texts, or two lists of messages

Any conversation may have `tools` and `chat_template_kwargs` beside it. Of a message only what a chat template
lays out is read; what would be lost is a fault: refusals, audio, parts that are not text. A conversation begins with a
user's message (after system messages), since some templates refuse another, and nothing asked for it.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from longspec.data.read.record_checks import (
    UNANSWERED_FIX,
    RecordError,
    check_characters,
    check_text,
    kind,
    parsed,
    read_calls,
    read_template_arguments,
    read_tools,
    says_nothing,
    stated,
    thought_apart,
)

CALL = "function_call"  # its value is the call itself, as LLaMA-Factory writes ShareGPT's messages
ROLES = dict.fromkeys(("system", "developer"), "system") | dict.fromkeys(("user", "human"), "user")
ROLES |= dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", CALL), "assistant")
ROLES |= dict.fromkeys(("tool", "function", "observation"), "tool")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names of a message's reasoning; the first is ours
UNREAD = ("refusal", "audio", "images", CALL)  # fields of a message with content that nobody lays out
UNREAD_BESIDE = ("images", "image", "videos", "audios", "functions")  # and such fields of a record
BESIDE = ("tools", "chat_template_kwargs")  # fields of a record beside its conversation
COMPLETION = ("prompt", "completion")
CONVERSATIONS = ("conversation", "conversations", "messages")
ANSWER_IDS = "answer_ids"  # the tokens of each answer by the target, in order (longspec.answers)
ARXIV_REQUEST = "Please summarize the following article: "

Message = dict[str, Any]


@dataclass(frozen=True)
class Text:
    """Hold running text; `prompt` stands before it, mostly empty, and is no part of the answer."""

    text: str
    prompt: str = ""


@dataclass(frozen=True)
class Chat:
    """Hold a conversation: each message has `role` (system | user | assistant | tool) and `content`.

    An assistant's message may have `reasoning_content` and `tool_calls`, a tool's `tool_call_id` and `name`.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    template_arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Tell whether it holds contents alone: no tools, calls, thoughts or template arguments."""
        return not (self.tools or self.template_arguments) and all(
            message.keys() == {"role", "content"} and message["role"] != "tool" for message in self.messages
        )


def role_of(turn: Any, place: str) -> tuple[str, str]:
    """Return a message's role (system | user | assistant | tool) and its content's field. Raises RecordError for others."""
    if not isinstance(turn, dict):
        raise RecordError(place, f"must be an object, is {kind(turn)}")
    who, what = ("from", "value") if turn.get("from") is not None else ("role", "content")
    role = turn.get(who)
    if not isinstance(role, str) or role not in ROLES:
        raise RecordError(f"{place}.{who}", f"{role!r} is no role that is laid out; known: {', '.join(ROLES)}")
    return ROLES[role], what


def _joined(parts: list[Any], place: str) -> str:
    """Return the text of a content given in parts, as OpenAI's messages may have it."""
    texts = []
    for number, part in enumerate(parts):
        if not isinstance(part, dict):
            raise RecordError(f"{place}[{number}]", f"must be an object, is {kind(part)}")
        if part.get("type") != "text":
            raise RecordError(f"{place}[{number}].type", f"{part.get('type')!r} is not 'text'; nothing else is laid out")
        texts.append(check_characters(part.get("text"), f"{place}[{number}].text"))
    return "".join(texts)


def _message(turn: Any, place: str) -> Message:
    role, what = role_of(turn, place)
    for name in UNREAD if role == "assistant" else (*UNREAD, "tool_calls", *THOUGHTS):
        if stated(turn, name):
            raise RecordError(f"{place}.{name}", "says something that is not laid out and would be lost")
    content, field = turn.get(what), f"{place}.{what}"
    if isinstance(content, list):
        content = _joined(content, field)
    if role == "assistant":
        return _answer(turn, content, what, place)
    # A system message may be empty, and so may be what a tool returns.
    check = check_text if role == "user" else check_characters
    message = {"role": role, "content": check(content, field)}
    if role == "tool":
        given = [name for name in ("tool_call_id", "name") if turn.get(name) is not None]
        message |= {name: check_text(turn[name], f"{place}.{name}") for name in given}
    return message


def _answer(turn: dict[str, Any], content: Any, what: str, place: str) -> Message:
    """Return a message of the assistant; its content may be missing if it calls tools."""
    field = f"{place}.{what}"
    if CALL in (turn.get("from"), turn.get("role")):
        calls, content = read_calls(check_text(content, field), field), ""
    else:
        calls = read_calls(given, f"{place}.tool_calls") if (given := stated(turn, "tool_calls")) else []
    message: Message = {"role": "assistant"}
    message["content"] = check_characters(content or "", field) if calls else check_text(content, field)
    thoughts = {check_characters(turn[name], f"{place}.{name}") for name in THOUGHTS if turn.get(name)}
    if len(thoughts) > 1:
        raise RecordError(f"{place}.{THOUGHTS[0]}", f"differs from what stands under another of {', '.join(THOUGHTS)}")
    thought = "".join(thoughts)
    if not says_nothing(thought):
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


def _conversation(turns: Any, field: str, unanswered: bool) -> Chat:
    """Return the conversation in a field, which may be JSON text. unanswered: whether questions alone will do."""
    turns = parsed(turns, field)
    if not isinstance(turns, list) or not turns:
        raise RecordError(field, "must be a list of messages that is not empty")
    messages = [_message(turn, f"{field}[{number}]") for number, turn in enumerate(turns)]
    roles = [message["role"] for message in messages]
    untrained = [number for number, role in enumerate(roles) if role == "assistant" and turns[number].get("weight") == 0]
    if untrained and not unanswered:
        place = f"{field}[{untrained[0]}].weight"
        raise RecordError(place, "is 0, but every answer is trained: end the conversation before it, or remove it")
    if "assistant" not in roles and not unanswered:
        raise RecordError(field, f"has no assistant message to learn from{UNANSWERED_FIX}")
    first = next((number for number, role in enumerate(roles) if role != "system"), None)
    if first is None:
        raise RecordError(field, "has no user message to answer")
    if roles[first] == "assistant":
        raise RecordError(
            f"{field}[{first}]", "begins the conversation as an assistant message that nothing asked for; see start_at"
        )
    return Chat(messages)


def _with_beside(record: dict[str, Any], chat: Chat) -> Chat:
    """Return the conversation with its record's tools and arguments. Unless it is plain, thoughts get a field of their own."""
    if record.get("train_thoughts") is False:
        raise RecordError("train_thoughts", "is false, but thoughts are always trained: remove the field, or the thoughts")
    for name in UNREAD_BESIDE:
        if stated(record, name):
            raise RecordError(name, "says something that is not laid out and would be lost, unless you `drop` it")
    arguments = read_template_arguments(stated(record, "chat_template_kwargs"))
    whole = Chat([*_system_beside(record, chat), *chat.messages], read_tools(stated(record, "tools")), arguments)
    return whole if whole.is_plain else replace(whole, messages=[_with_thought(message) for message in whole.messages])


def _system_beside(record: dict[str, Any], chat: Chat) -> list[Message]:
    """Return the system message that a record has in a field of its own, unless the conversation begins with one."""
    said = {name: record[name] for name in ("system", "system_prompt") if record.get(name) is not None}
    said = {name: text for name, text in said.items() if not isinstance(text, str) or not says_nothing(text)}
    first = chat.messages[0]
    texts = [check_text(text, name) for name, text in said.items()]
    texts += [first["content"]] if said and first["role"] == "system" else []
    if any(text != texts[0] for text in texts):
        raise RecordError(next(iter(said)), "stands beside another system message of the record; remove one of the two")
    return [{"role": "system", "content": texts[0]}] if said and first["role"] != "system" else []


def _with_thought(message: Message) -> Message:
    """Return a message with the thought that begins its content (<think> ... </think>) in a field of its own."""
    found = None if message["role"] != "assistant" or "reasoning_content" in message else thought_apart(message["content"])
    if found is None:
        return message
    thought, said = found
    apart = message | {"content": said}
    return apart if says_nothing(thought) else apart | {"reasoning_content": thought}


def _arxiv(record: dict[str, Any]) -> Chat:
    """Return a pair of turns for each article and its abstract, each field a text or a list, of equal length."""
    both = (record.get("article"), record.get("abstract"))
    articles, abstracts = (each if isinstance(each, list) else [each] for each in both)
    if len(articles) != len(abstracts) or not articles:
        raise RecordError("abstract", f"{len(abstracts)} for {len(articles)} articles; there must be one for each")
    messages = []
    for number, (article, abstract) in enumerate(zip(articles, abstracts, strict=True)):
        article = check_text(article, f"article[{number}]")
        messages.append({"role": "user", "content": ARXIV_REQUEST + article})
        messages.append({"role": "assistant", "content": check_text(abstract, f"abstract[{number}]")})
    return Chat(messages)


def _pair(record: dict[str, Any], asked: str, answered: str, unanswered: bool) -> Chat:
    """Return a question and its answer, both texts. unanswered: whether the question alone will do."""
    messages = [{"role": "user", "content": check_text(record.get(asked), asked)}]
    if record.get(answered) is not None:
        messages.append({"role": "assistant", "content": check_text(record[answered], answered)})
    elif not unanswered:
        raise RecordError(answered, f"is missing or null{UNANSWERED_FIX}")
    return Chat(messages)


def _completion(record: dict[str, Any], unanswered: bool) -> Chat:
    """Return prompt and completion as a conversation: two texts, or messages, the completion's last."""
    prompt, completion = record["prompt"], record.get("completion")
    if not isinstance(prompt, list):
        return _pair(record, *COMPLETION, unanswered)
    if not isinstance(completion, list | None):
        raise RecordError("completion", "is no list of messages, and the prompt is one; give both in one form")
    return _conversation([*prompt, *(completion or [])], "prompt", unanswered)


def to_messages_or_text(record: dict[str, Any], unanswered: bool = False) -> Text | Chat:
    """Return the document of a record in a published format. unanswered: whether questions alone will do for a conversation.

    Raises RecordError, with the field at fault, if it fits no format.
    """
    source = record.get("source")
    there = {name for name, value in record.items() if value is not None}
    if source == "arxiv" and there & {"article", "abstract"}:
        return _with_beside(record, _arxiv(record))
    for name in CONVERSATIONS:
        if name in there:
            return _with_beside(record, _conversation(record[name], name, unanswered))
    if there & {"problem", "qwq"}:
        return _with_beside(record, _pair(record, "problem", "qwq", unanswered))
    if "text" in there or source in ("code", "book"):
        return Text(check_text(record.get("text"), "text"))
    if "target" in there:
        nothing = source is None or (isinstance(source, str) and says_nothing(source))
        return Text(check_text(record["target"], "target"), "" if nothing else check_text(source, "source"))
    if there.issuperset(COMPLETION) or (unanswered and "prompt" in there):
        return _with_beside(record, _completion(record, unanswered))
    pairs = "problem + qwq, prompt + completion, article + abstract of source 'arxiv'"
    known = f"text, target, {', '.join(CONVERSATIONS)}, {pairs}"
    raise RecordError("record", f"fits no known format (fields: {', '.join(sorted(there)) or 'none'}; known: {known})")
