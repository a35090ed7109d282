"""The published record formats, validated and normalised to running text or to a conversation.

Which format a record is in follows from its fields; one that is null counts as missing. In this order:

    source == "arxiv"                        article + abstract, each a text or a list of equal length (or text)
    conversation, conversations or messages  a list of {role, content} (OpenAI, tulu) or {from, value} (ShareGPT)
    problem + qwq                            long chain of thought
    text                                     running text
    target                                   running text after a prompt `source`, which may be empty
    prompt + completion                      a question and its answer: two texts, or two lists of messages

Any conversation may have beside it `tools`, `chat_template_kwargs` and `train_thoughts`.
"""

from dataclasses import dataclass
from typing import Any

from longspec.data.read.conversations import BESIDE, Chat, read_conversation, with_beside
from longspec.data.read.record_checks import UNANSWERED_FIX, RecordError, check_text, says_nothing

COMPLETION = ("prompt", "completion")
CONVERSATIONS = ("conversation", "conversations", "messages")
# Every field by which a format is recognised or which it reads.
FIELDS = ("source", "article", "abstract", *CONVERSATIONS, "problem", "qwq", "text", "target", *COMPLETION, *BESIDE)
ARXIV_REQUEST = "Please summarize the following article: "


@dataclass(frozen=True)
class Text:
    """Running text; `prompt` stands before it and is no part of the answer (mostly empty)."""

    text: str
    prompt: str = ""


def _arxiv(record: dict[str, Any]) -> Chat:
    """Article and abstract, each a text or a list of equal length: one pair of turns for each."""
    articles, abstracts = record.get("article"), record.get("abstract")
    if not isinstance(articles, list):
        articles = [articles]
    if not isinstance(abstracts, list):
        abstracts = [abstracts]
    if len(articles) != len(abstracts) or not articles:
        raise RecordError("abstract", f"{len(abstracts)} for {len(articles)} articles; there must be one for each")
    messages = []
    for number, (article, abstract) in enumerate(zip(articles, abstracts, strict=True)):
        article = check_text(article, f"article[{number}]")
        messages.append({"role": "user", "content": ARXIV_REQUEST + article})
        messages.append({"role": "assistant", "content": check_text(abstract, f"abstract[{number}]")})
    return Chat(messages)


def _problem(record: dict[str, Any], unanswered: bool) -> Chat:
    """Long chain-of-thought: the problem and the reasoning that answers it; unanswered: the problem alone will do."""
    messages = [{"role": "user", "content": check_text(record.get("problem"), "problem")}]
    if record.get("qwq") is None and unanswered:
        return Chat(messages)
    if record.get("qwq") is None:
        raise RecordError("qwq", f"is missing or null{UNANSWERED_FIX}")
    return Chat([*messages, {"role": "assistant", "content": check_text(record["qwq"], "qwq")}])


def _completion(record: dict[str, Any], unanswered: bool) -> Chat:
    """Prompt and completion: texts, or messages of which the completion's come last; unanswered: the prompt alone will do."""
    prompt, completion = (record.get(field) for field in COMPLETION)
    if prompt is None or (completion is None and not unanswered):
        missing = COMPLETION[0] if prompt is None else COMPLETION[1]
        raise RecordError(missing, f"is missing or null{UNANSWERED_FIX if prompt is not None else ''}")
    if isinstance(prompt, list):
        whole = [*prompt, *(completion if isinstance(completion, list) else [])]
        if completion is not None and not isinstance(completion, list):
            raise RecordError("completion", "is no list of messages, and the prompt is one; give both in one form")
        return read_conversation(whole, "prompt", unanswered)
    messages = [{"role": "user", "content": check_text(prompt, "prompt")}]
    if completion is not None:
        messages.append({"role": "assistant", "content": check_text(completion, "completion")})
    return Chat(messages)


def _target(record: dict[str, Any]) -> Text:
    """General text: `target`, after a prompt `source` that may be empty."""
    source = record.get("source")
    nothing = source is None or (isinstance(source, str) and says_nothing(source))
    return Text(check_text(record["target"], "target"), "" if nothing else check_text(source, "source"))


ANSWER_IDS = "answer_ids"  # of answers by the target: the tokens of each, in order (longspec.answers)


def to_messages_or_text(record: dict[str, Any], unanswered: bool = False) -> Text | Chat:
    """The normalised document of a record in a published format; unanswered: a conversation may have questions alone.

    Raises RecordError when it fits no format.
    """
    source = record.get("source")
    there = {field for field, value in record.items() if value is not None}
    if source == "arxiv" and (there & {"article", "abstract"} or "text" not in there):
        return with_beside(record, _arxiv(record))
    for field in CONVERSATIONS:
        if field in there:
            return with_beside(record, read_conversation(record[field], field, unanswered))
    if source == "tulu-v2":
        raise RecordError("conversation", "is missing or null, though source is 'tulu-v2'")
    if there & {"problem", "qwq"}:
        return with_beside(record, _problem(record, unanswered))
    if "text" in there or source in ("code", "book"):
        return Text(check_text(record.get("text"), "text"))
    if "target" in there:
        return _target(record)
    if there.issuperset(COMPLETION) or (unanswered and "prompt" in there):
        return with_beside(record, _completion(record, unanswered))
    for field in ("text", "target", "problem", "qwq", *CONVERSATIONS):
        if field in record:
            raise RecordError(field, "is null")
    pairs = "problem + qwq, prompt + completion, article + abstract of source 'arxiv'"
    known = f"text, target, {', '.join(CONVERSATIONS)}, {pairs}"
    raise RecordError("record", f"fits no known format (fields: {', '.join(record) or 'none'}; known: {known})")
