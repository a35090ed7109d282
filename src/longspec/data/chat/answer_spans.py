"""Where a chat template writes each message: its own words around the contents, and the answers in a rendered text.

A template is a program, and many look at what they lay out: they strip contents, drop the reasoning of earlier answers, put
the system message before the last question. So nothing here cuts templates apart: a conversation is rendered, and placeholders
in place of contents, rendered too, tell where each content stands.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jinja2 import TemplateError

from longspec.data.chat.special_tokens import LayoutError, unused_characters

Messages = list[dict[str, str]]
# The text of messages, with the request for an answer behind them or not, and what the template marks as generated.
Render = Callable[[Messages, bool], tuple[str, list[tuple[int, int]]]]


@dataclass(frozen=True)
class Answer:
    """Characters start..end of a rendered text: an answer from where its model goes on writing, its end marker included."""

    start: int
    end: int
    whole: bool  # nothing of the message is missing there
    as_served: bool  # the text before it is what the template asks for an answer with


@dataclass(frozen=True)
class Skeleton:
    """The text that a template writes around the contents of one sequence of roles."""

    order: list[int]  # the messages as their contents stand in the text; empty when not each stands there once
    parts: list[str]  # before, between and behind these contents
    ends: dict[int, str]  # what closes each answer, up to its end token
    requests: dict[int, str]  # what asks for each answer, behind the content before it; missing when the template does not
    leads: dict[int, str]  # white space between a request and its answer: the model writes it; missing for other text


def _placeholder(number: int) -> str:
    return f"\ue000{number}\ue001"


def _try(render: Render, messages: Messages, ask: bool) -> str | None:
    """The rendered text; None when the template refuses these messages, as some do when they end here."""
    try:
        return render(messages, ask)[0]
    except TemplateError:
        return None


def _shared(one: str, other: str) -> str:
    if other.startswith(one):
        return one
    return one[: next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))]


def up_to_token(text: str, tokens: Iterable[str]) -> str:
    """The text through the first of the named tokens in it; without one, through its last visible character."""
    found = [(place, -len(token)) for token in tokens if (place := text.find(token)) >= 0]
    if not found:
        return text.rstrip()
    place, length = min(found)
    return text[: place - length]


def _end(render: Render, messages: Messages, number: int, behind: str, tokens: Iterable[str]) -> str:
    """The text that closes an answer: of the text behind it, the beginning that is there without later messages too."""
    alone = _try(render, messages[: number + 1], False)
    if alone is not None and _placeholder(number) in alone:
        behind = _shared(behind, alone.rpartition(_placeholder(number))[2])
    return up_to_token(behind, tokens)


def _tail(render: Render, messages: Messages, ask: bool) -> str | None:
    """The text behind the last content; None where the template refuses the messages or there are none."""
    text = _try(render, messages, ask) if messages else None
    return None if text is None else text.rpartition("\ue001")[2]


def skeleton(render: Render, roles: tuple[str, ...], ask: bool, tokens: tuple[str, ...]) -> Skeleton:
    """The template's words for these roles; `tokens`: names of the tokenizer's added tokens. Raises TemplateError."""
    messages = [{"role": role, "content": _placeholder(number)} for number, role in enumerate(roles)]
    split = re.split("\ue000(\\d+)\ue001", render(messages, ask)[0])
    parts, order = split[::2], [int(number) for number in split[1::2]]
    bones = Skeleton(order if sorted(order) == list(range(len(roles))) else [], parts, {}, {}, {})
    for at, number in enumerate(order):
        if roles[number] != "assistant":
            continue
        bones.ends[number] = _end(render, messages, number, parts[at + 1], tokens)
        told, asked = (_tail(render, messages[:number], ask) for ask in (False, True))
        if asked is None:
            continue
        lead = parts[at].removeprefix(asked)
        if parts[at].startswith(asked) and not lead.strip():
            bones.leads[number] = lead
        if asked != told or number in bones.leads:
            bones.requests[number] = asked
    return bones


def _written(text: str, place: int, content: str, following: str) -> str | None:
    """The content as it stands at a place, before the template's following words: in full, or stripped."""
    for form in (content, content.strip(), content.lstrip(), content.rstrip()):
        if text.startswith(form, place) and text.startswith(following, place + len(form)):
            return form
    return None


def match(bones: Skeleton, text: str, messages: Messages) -> dict[int, tuple[int, int]] | None:
    """The characters of every content, when the text is the skeleton with the contents in it and nothing else."""
    if not bones.order or not text.startswith(bones.parts[0]):
        return None
    place, spans = len(bones.parts[0]), {}
    for number, following in zip(bones.order, bones.parts[1:], strict=True):
        form = _written(text, place, messages[number]["content"], following)
        if form is None:
            return None
        spans[number] = (place, place + len(form))
        place += len(form) + len(following)
    return spans if place == len(text) else None


def _squeeze(text: str) -> str:
    """The text without white space, which templates add and drop."""
    return "".join(text.split())


def _is_whole(written: str, content: str, number: int) -> bool:
    """Whether an answer stands in full in the text. Raises LayoutError when what stands there is no end of it either."""
    written, content = _squeeze(written), _squeeze(content)
    if not written or not content.endswith(written):
        raise LayoutError(f"messages[{number}].content: the chat template does not write this answer out")
    return written == content


def locate(render: Render, ask: bool, bones: Skeleton, text: str, messages: Messages, number: int) -> tuple[int, int, bool]:
    """Where an answer's content stands, and whether in full, by rendering a placeholder in its place alone.

    Raises LayoutError when it stands there not once, or altered in another way than that its beginning is left out.
    """
    mark = next(unused_characters(text + "".join(message["content"] for message in messages)))
    swapped = [*messages[:number], {"role": "assistant", "content": mark}, *messages[number + 1 :]]
    other, _ = render(swapped, ask)
    if other.count(mark) != 1:
        raise LayoutError(f"messages[{number}].content: the chat template writes it {other.count(mark)} times")
    before, _, behind = other.partition(mark)
    if not text.endswith(behind):
        raise LayoutError(f"messages[{number}].content: what the chat template writes behind it depends on it")
    start, end = len(_shared(before, text)), len(text) - len(behind)
    content, request = messages[number]["content"], bones.requests.get(number, "")
    if start < len(before) and request and (place := text.rfind(request, 0, start)) >= 0:
        # The template writes something else before this content than before a placeholder: it is part of the content,
        # such as the mark that opens the reasoning, if the whole is then the content.
        early = place + len(request)
        if _squeeze(text[early:end]) == _squeeze(content):
            return early, end, True
    return start, end, _is_whole(text[start:end], content, number)


def _as_served(bones: Skeleton, text: str, number: int, start: int) -> bool:
    return number in bones.requests and text.endswith(bones.requests[number], 0, start)


def close(bones: Skeleton, text: str, number: int, span: tuple[int, int], whole: bool) -> Answer:
    """An answer from the place of its content. Raises LayoutError when its end marker does not stand behind it."""
    start, end = span
    marker, lead = bones.ends.get(number, ""), bones.leads.get(number, "")
    if not text.startswith(marker, end):
        raise LayoutError(f"messages[{number}]: the chat template closes this answer otherwise than others")
    if lead and text.endswith(lead, 0, start):
        start -= len(lead)
    return Answer(start, end + len(marker), whole, _as_served(bones, text, number, start))


def generated(bones: Skeleton, text: str, messages: Messages, number: int, span: tuple[int, int]) -> Answer:
    """An answer from what the template itself marks as generated. Raises LayoutError when that is another text."""
    start, end = span
    marker = bones.ends.get(number, "")
    body = text[start:end].rstrip()
    if marker and body.endswith(marker.rstrip()):
        end = start + len(body)
        body = body.removesuffix(marker.rstrip())
    elif text.startswith(marker, end):
        end += len(marker)
    content = _squeeze(messages[number]["content"])
    # Such a block may hold more than the content, an empty reasoning for instance.
    whole = True if _squeeze(body).endswith(content) else _is_whole(body, content, number)
    return Answer(start, end, whole, _as_served(bones, text, number, start))
