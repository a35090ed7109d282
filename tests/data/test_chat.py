"""Conversations through templates as families have them: which tokens are trained, held against text written by hand."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from longspec.data.chat import chat_template
from longspec.data.chat.chat_template import CHATML, ChatTemplate
from longspec.data.chat.encoding import Encoded
from longspec.data.chat.layout import lay_out
from longspec.data.chat.special_tokens import LayoutError
from longspec.data.read.records import Chat
from tests.data import families
from tests.data.families import stretches
from tests.refusals import refused

ONE = [("user", "What is 2 + 2?"), ("assistant", "It is 4.")]
TWO = [("system", "Be brief."), ("user", "q"), ("assistant", "a"), ("user", "q"), ("assistant", "longer a, 14 - 3 = 11")]
REASONED = [
    ("user", "first"),
    ("assistant", "<think>\nhm\n</think>\n\nyes"),
    ("user", "second"),
    ("assistant", "<think>\nwell\n</think>\n\nno"),
]
END = {"llama": "<|turn_end|>", "mistral": "</s>", "r1": "<|eos|>", "phi": "<|end|>"}
NAMES = sorted(families.FAMILIES)


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return families.byte_level()


@pytest.fixture(scope="session")
def tokenizers(byte_level: Tokenizer) -> dict[str, Any]:
    """One tokenizer of each family; `spaced` is Mistral's template over spaces that are part of words."""
    made = {name: families.family(name, byte_level) for name in NAMES}
    return made | {"spaced": families.family("mistral", families.spaces_in_words())}


def messages(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def encoded(tokenizer: Any, turns: list[tuple[str, str]]) -> Encoded:
    """The one document of a conversation."""
    [document] = families.encoded(tokenizer, {"messages": messages(turns)})
    return document


def end_of(name: str) -> str:
    return END.get("mistral" if name == "spaced" else name, "<|im_end|>")


@pytest.mark.parametrize("name", [*NAMES, "spaced"])
def test_tokens_are_those_of_transformers_and_answers_are_trained(tokenizers: dict[str, Any], name: str) -> None:
    tokenizer, end = tokenizers[name], end_of(name)
    # The space that a template puts before an answer, and not into its request, is for the model to write.
    space = " " if name in ("mistral", "spaced") else ""
    # Mistral's template puts a system message before the last question: each answer is then a document of its own.
    for turns in (ONE, TWO[1:] if name in ("mistral", "spaced") else TWO):
        expected = tokenizer.apply_chat_template(messages(turns), tokenize=True, return_dict=False)
        if name == "llama":  # the date is ours
            dated = ChatTemplate.of(tokenizer).render(messages(turns), False)
            expected = tokenizer(dated, add_special_tokens=False).input_ids
        document = encoded(tokenizer, turns)
        ids = document.ids.tolist()
        # White space behind the last answer is left out; a document is closed with eos.
        shared = len(ids) - 1 if ids[-1] != expected[min(len(ids), len(expected)) - 1] else len(ids)
        assert ids[:shared] == expected[:shared]
        assert not tokenizer.decode(expected[shared:]).strip()
        assert ids[shared:] in ([], [tokenizer.eos_token_id])
        if name != "plain":
            answers = [f"{space}{content}{end}" for role, content in turns if role == "assistant"]
            assert stretches(tokenizer, document) == answers
        # The last answer begins where the request for it ends.
        request = ChatTemplate.of(tokenizer).render(messages(turns[:-1]), True)
        prompt = tokenizer(request, add_special_tokens=False).input_ids
        assert document.as_served is (name not in ("qwen3", "r1"))
        if document.as_served and name != "spaced":
            assert ids[: len(prompt)] == prompt
            assert document.answer_mask[len(prompt) - 1 : len(prompt) + 1].tolist() == [0, 1]


PLAIN_CHATS = json.loads(Path(__file__).with_name("plain_chats.json").read_text(encoding="utf-8"))
KEPT = {
    "tail": [("user", "q"), ("assistant", "a"), ("user", "thanks")],
    "twice": [("user", "q"), ("assistant", "a"), ("assistant", "b"), ("user", "q"), ("assistant", "c")],
    "tight": [("user", "first"), ("assistant", "<think>well</think>no")],
    "emptythought": [("user", "first"), ("assistant", "\n</think>\n\nno")],
}


@pytest.mark.parametrize("name", sorted(PLAIN_CHATS))
def test_plain_chats_keep_their_text_and_what_is_trained_of_it(byte_level: Tokenizer, name: str) -> None:
    """Of odd chats, where a template rewrites no history: as laid out when such chats had a way of their own."""
    tokenizer = families.family(name if name != "chatml" else "qwen2.5", byte_level)
    tokenizer.chat_template = CHATML if name == "chatml" else tokenizer.chat_template
    laid_out = {}
    for key in PLAIN_CHATS[name]:
        [conversation] = lay_out(ChatTemplate.of(tokenizer), Chat(messages(KEPT[key])), {})
        text = conversation.text
        for start, end in reversed(conversation.answers):
            text = f"{text[:start]}⟦{text[start:end]}⟧{text[end:]}"
        laid_out[key] = text
    assert laid_out == PLAIN_CHATS[name]


@pytest.mark.parametrize(("name", "opened"), [("qwen3", "<think>\n"), ("r1", "")])
def test_reasoning_within_contents_is_trained_once_behind_what_is_served(
    tokenizers: dict[str, Any], name: str, opened: str
) -> None:
    """Also where the template drops it from the last answer: the request opens it, and the content does not do so twice."""
    tokenizer, end = tokenizers[name], end_of(name)
    first, second = families.encoded(tokenizer, {"messages": messages(REASONED)})
    assert stretches(tokenizer, first) == [f"{opened}hm\n</think>\n\nyes{end}"]
    assert stretches(tokenizer, second) == [f"{opened}well\n</think>\n\nno{end}"]
    for document, turns in ((first, REASONED[:1]), (second, REASONED[:3])):
        request = tokenizer.apply_chat_template(messages(turns), tokenize=False, add_generation_prompt=True)
        assert stretches(tokenizer, document, kind=0)[0] == request
        assert document.as_served


@pytest.mark.parametrize(
    ("request_for_it", "content"),
    [("assistant:\\n", "It is 4."), ("", "It is 4."), ("assistant: <think>", "<think>4</think>"), ("?", " It is 4.\n")],
)
def test_an_answer_that_its_request_does_not_lead_to_is_trained_alone_and_told(
    byte_level: Tokenizer, request_for_it: str, content: str
) -> None:
    tokenizer = families.family("mistral", byte_level)
    asking = "{% if add_generation_prompt %}{{ '" + request_for_it + "' }}{% endif %}"
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}" + asking
    document = encoded(tokenizer, [("user", "q"), ("assistant", content)])
    assert tokenizer.decode(document.ids) == f"user: q</s>assistant: {content}</s>"
    assert stretches(tokenizer, document) == [f"{content}</s>"]
    assert not document.as_served


@pytest.mark.parametrize(
    ("template", "field", "fact"),
    [
        ("{% for m in messages %}{{ m.content[:3] }};{% endfor %}", ".content", "this answer"),
        ("{% for m in messages %}{{ m.content | upper }};{% endfor %}", ".content", "this answer"),
        ("{% for m in messages %}{{ m.content }};{{ m.content }};{% endfor %}", ".content", "2 times"),
        ("{% for m in messages %}{{ m.role }};{% endfor %}", ".content", "such an"),
        ("{% for m in messages %}{{ m.content }}{{ m.content | length }};{% endfor %}", "", "no token"),
        ("{% for m in messages %}{{ m.content }}{{ m.content | length }}<s>{% endfor %}", ".content", "this answer"),
        ("{% for m in messages %}{{ m.content.split('</think>')[0] }};{% endfor %}", ".content", "this answer"),
    ],
)
def test_answers_that_cannot_be_told_are_refused(byte_level: Tokenizer, template: str, field: str, fact: str) -> None:
    tokenizer = families.family("mistral", byte_level)
    tokenizer.chat_template = template
    with refused(f"messages[1]{field}:", fact, kind=LayoutError):
        encoded(tokenizer, [("user", "q"), ("assistant", "It is 4.</think>5")])


def test_a_name_of_a_special_token_cut_in_two_is_refused(byte_level: Tokenizer) -> None:
    tokenizer = families.family("qwen2.5", byte_level)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content[-12:] }};{% endfor %}"
    with refused("the chat template", "special token", kind=LayoutError):
        encoded(tokenizer, [("user", "a name <|im_end|> of"), ("assistant", "hello")])


def test_wrong_tokens_are_found_by_decoding(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the places wrong, no document would come out: the mask is never silently another."""
    from longspec.data.chat import encoding

    right = encoding._token_at
    monkeypatch.setattr(encoding, "_token_at", lambda *given: right(*given) + 1)
    with refused("its tokens", "decode", kind=LayoutError):
        encoded(families.family("qwen2.5", byte_level), ONE)


def test_the_date_is_the_same_on_any_day(tokenizers: dict[str, Any]) -> None:
    text = ChatTemplate.of(tokenizers["llama"]).render(messages(ONE), False)
    assert "Today: 26 Jul 2024\n" in text
    day = datetime(2024, 7, 26)
    assert {code: day.strftime(code) for code in chat_template.DAY} == chat_template.DAY


def test_chatml_is_the_default_and_the_log_says_so(byte_level: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = families.family("qwen2.5", byte_level)
    tokenizer.chat_template = None
    tokenizer.name_or_path = "bare"
    document = encoded(tokenizer, ONE)
    assert "bare: no chat template in this tokenizer; conversations are laid out as ChatML" in capsys.readouterr().out
    assert tokenizer.decode(document.ids) == (
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\nIt is 4.<|im_end|>"
    )
    assert stretches(tokenizer, document) == ["It is 4.<|im_end|>"]


WORDS = ["a", "ab", " ", "\n", "\n\n", "\t", ".", "größer", "🙂", "e\u0301", "14"]
WORDS += ["<|im_end|>", "</s>", "[INST]", "<|turn_end|>", "<|start|>", "<|User|>", "<|eos|>"]
WORDS += ["<|end|>", "<", "|", "▁", "\ue000"]
CONTENTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=12).map("".join).filter(str.strip)


@settings(max_examples=150)
@given(
    name=st.sampled_from(["llama", "qwen2.5", "mistral", "r1", "phi", "marked", "plain"]),
    contents=st.lists(CONTENTS, min_size=2, max_size=6),
)
def test_any_answers_come_back_from_their_tokens(tokenizers: dict[str, Any], name: str, contents: list[str]) -> None:
    """Whatever is said, names of special tokens too: the trained tokens decode to the answers as the template writes them."""
    tokenizer = tokenizers[name]
    turns = [(("user", "assistant")[n % 2], content) for n, content in enumerate(contents)]
    document, plain = encoded(tokenizer, turns), encoded(tokenizer, [(role, "x") for role, _ in turns])
    # Also names of special tokens that have no role in the tokenizer stay text.
    control = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    assert [i for i in document.ids if i in control] == [i for i in plain.ids if i in control]
    stripped = name in ("llama", "mistral")
    answers = [content.strip() if stripped else content for role, content in turns if role == "assistant"]
    texts = stretches(tokenizer, document)
    if name == "plain":
        # Without end tokens; the layout's own lines and the last answer's cannot be told apart.
        assert [text.strip() for text in texts] == [answer.strip() for answer in answers[:-1]] + [texts[-1].strip()]
        assert texts[-1].removesuffix("<|endoftext|>").strip() == answers[-1].strip()
        return
    space = " " if name == "mistral" else ""
    assert texts == [f"{space}{answer}{end_of(name)}" for answer in answers]
