"""Conversations through templates as families have them: which tokens are trained, held against text written by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from longspec.data.chat import chat_template
from longspec.data.chat.chat_template import ChatTemplate
from longspec.data.chat.encoding import Encoded, Encoder
from longspec.data.chat.special_tokens import LayoutError
from tests.data import families

ONE = [("user", "What is 2 + 2?"), ("assistant", "It is 4.")]
TWO = [("system", "Be brief."), ("user", "q"), ("assistant", "a"), ("user", "q"), ("assistant", "longer a, 14 - 3 = 11")]
REASONED = [
    ("user", "first"),
    ("assistant", "<think>\nhm\n</think>\n\nyes"),
    ("user", "second"),
    ("assistant", "<think>\nwell\n</think>\n\nno"),
]
END = {"llama": "<|turn_end|>", "mistral": "</s>", "r1": "<|eos|>", "phi": "<|end|>", "gemma": "<end_of_turn>"}
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
    encoder = Encoder(tokenizer)
    [documents] = encoder.encode(encoder.plan([{"messages": messages(turns)}]))
    if isinstance(documents, LayoutError):
        raise documents
    return documents[0]


def trained(tokenizer: Any, document: Encoded) -> list[str]:
    """The decoded text of each stretch of trained tokens."""
    texts, stretch = [], []
    for token, is_trained in zip([*document.ids.tolist(), -1], [*document.answer_mask.tolist(), 0], strict=True):
        if is_trained:
            stretch.append(token)
        elif stretch:
            texts.append(tokenizer.decode(stretch, skip_special_tokens=False))
            stretch = []
    return texts


def end_of(name: str) -> str:
    return END.get("mistral" if name == "spaced" else name, "<|im_end|>")


@pytest.mark.parametrize("name", [*(n for n in NAMES if n not in ("plain", "gemma")), "spaced"])
def test_answers_and_their_ends_are_trained(tokenizers: dict[str, Any], name: str) -> None:
    tokenizer, end = tokenizers[name], end_of(name)
    # The space that a template puts before an answer, and not into its request, is for the model to write.
    space = " " if name in ("mistral", "spaced") else ""
    for turns in (ONE, TWO):
        answers = [f"{space}{content}{end}" for role, content in turns if role == "assistant"]
        assert trained(tokenizer, encoded(tokenizer, turns)) == answers


@pytest.mark.parametrize("name", [*(n for n in NAMES if n != "gemma"), "spaced"])
def test_tokens_are_those_of_transformers(tokenizers: dict[str, Any], name: str) -> None:
    tokenizer = tokenizers[name]
    for turns in (ONE, TWO):
        expected = tokenizer.apply_chat_template(messages(turns), tokenize=True, return_dict=False)
        if name == "llama":  # the date is ours
            dated = ChatTemplate.of(tokenizer).render(messages(turns), False)[0]
            expected = tokenizer(dated, add_special_tokens=False).input_ids
        ids = encoded(tokenizer, turns).ids.tolist()
        # White space behind the last answer is left out; a document is closed with eos.
        shared = len(ids) - 1 if ids[-1] != expected[min(len(ids), len(expected)) - 1] else len(ids)
        assert ids[:shared] == expected[:shared]
        assert not tokenizer.decode(expected[shared:]).strip()
        assert ids[shared:] in ([], [tokenizer.eos_token_id])


@pytest.mark.parametrize("name", ["llama", "qwen2.5", "mistral", "phi", "gemma", "marked", "marked, no end", "plain"])
def test_the_last_answer_begins_where_the_request_for_it_ends(tokenizers: dict[str, Any], name: str) -> None:
    tokenizer = tokenizers[name]
    turns = [("user", "q"), ("assistant", "a"), ("user", "14 - 3?"), ("assistant", "11")]
    document = encoded(tokenizer, turns)
    request = ChatTemplate.of(tokenizer).render(messages(turns[:-1]), True)[0]
    prompt = tokenizer(request, add_special_tokens=False).input_ids
    assert document.as_served
    assert document.ids[: len(prompt)].tolist() == prompt
    assert document.answer_mask[len(prompt) - 1 : len(prompt) + 1].tolist() == [0, 1]


@pytest.mark.parametrize("name", sorted({"llama", "mistral", "gemma", "r1"}))
def test_a_text_begins_once(tokenizers: dict[str, Any], name: str) -> None:
    tokenizer = tokenizers[name]
    assert encoded(tokenizer, ONE).ids.tolist().count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("name", ["marked", "marked, no end"])
def test_marked_answers_against_transformers(tokenizers: dict[str, Any], name: str) -> None:
    tokenizer = tokenizers[name]
    expected = tokenizer.apply_chat_template(messages(TWO), tokenize=True, return_dict=True, return_assistant_tokens_mask=True)[
        "assistant_masks"
    ]
    mask = encoded(tokenizer, TWO).answer_mask.tolist()
    if name == "marked, no end":  # where the mark leaves the end token out, it is trained all the same
        expected = [now or before for before, now in zip([0, *expected], expected, strict=False)]
    assert mask == expected[: len(mask)]


def test_reasoning_left_out_of_earlier_answers_is_not_trained(tokenizers: dict[str, Any]) -> None:
    document = encoded(tokenizers["qwen3"], REASONED)
    assert trained(tokenizers["qwen3"], document) == ["yes<|im_end|>", "<think>\nwell\n</think>\n\nno<|im_end|>"]
    assert document.shortened == 1
    assert document.as_served
    whole = tokenizers["qwen3"].apply_chat_template(messages(REASONED), tokenize=False)
    assert tokenizers["qwen3"].decode(document.ids) == whole.rstrip()


def test_reasoning_laid_out_anew_is_the_answer(tokenizers: dict[str, Any]) -> None:
    turns = [("user", "first"), ("assistant", "<think>well</think>no")]
    assert trained(tokenizers["qwen3"], encoded(tokenizers["qwen3"], turns)) == ["<think>\nwell\n</think>\n\nno<|im_end|>"]


def test_reasoning_that_a_template_would_put_there_is_not_the_answer(tokenizers: dict[str, Any]) -> None:
    document = encoded(tokenizers["qwen3"], ONE)
    assert "<think>\n\n</think>\n\nIt is 4." in tokenizers["qwen3"].decode(document.ids)
    assert trained(tokenizers["qwen3"], document) == ["It is 4.<|im_end|>"]
    assert not document.as_served


def test_an_empty_thought_keeps_the_line_end_that_the_model_writes(tokenizers: dict[str, Any]) -> None:
    """The request ends with "<think>\\n", and the content begins with the line end behind an empty thought."""
    tokenizer, content = tokenizers["r1"], "\n</think>\n\nfour"
    document = encoded(tokenizer, [("user", "two and two?"), ("assistant", content)])
    whole = tokenizer.decode(document.ids, skip_special_tokens=False)
    assert whole.endswith("<|Assistant|><think>\n\n</think>\n\nfour<|eos|>")
    assert tokenizer.decode(document.ids[document.answer_mask == 1]) == f"{content}<|eos|>"
    opened = encoded(tokenizer, [("user", "two and two?"), ("assistant", "<think>\nit is\n</think>\n\nfour")])
    assert tokenizer.decode(opened.ids[opened.answer_mask == 1]) == "it is\n</think>\n\nfour<|eos|>"


def test_a_template_that_drops_all_reasoning_still_trains_the_last(tokenizers: dict[str, Any]) -> None:
    """As it is served: the request opens the reasoning, and the content does not open it twice."""
    tokenizer = tokenizers["r1"]
    document = encoded(tokenizer, REASONED)
    assert trained(tokenizer, document) == ["\n\nyes<|eos|>", "well\n</think>\n\nno<|eos|>"]
    request = tokenizer.apply_chat_template(messages(REASONED[:-1]), tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(document.ids) == request + "well\n</think>\n\nno<|eos|>"
    assert document.as_served
    assert document.shortened == 1


def test_an_answer_unlike_the_served_is_told(tokenizers: dict[str, Any]) -> None:
    assert not encoded(tokenizers["r1"], ONE).as_served


def test_without_an_end_token_the_last_answer_still_ends(tokenizers: dict[str, Any]) -> None:
    document = encoded(tokenizers["plain"], [*ONE, ("user", "q"), ("assistant", "a")])
    assert trained(tokenizers["plain"], document) == [" It is 4.", " a<|endoftext|>"]


@pytest.mark.parametrize("name", ["plain", "llama", "qwen2.5"])
def test_a_question_at_the_end_does_not_train_the_end(tokenizers: dict[str, Any], name: str) -> None:
    document = encoded(tokenizers[name], [*ONE, ("user", "thanks")])
    assert document.answer_mask[-1] == 0
    assert len(trained(tokenizers[name], document)) == 1


@pytest.mark.parametrize("name", ["qwen2.5", "marked", "phi", "qwen3"])
@pytest.mark.parametrize(
    "answer", ["\n\nIt begins with lines", "ends with space  ", "größer 🙂", "x", "q", "\n", "  ", "a\u0301e"]
)
def test_edges_of_an_answer_are_exact(tokenizers: dict[str, Any], name: str, answer: str) -> None:
    if not answer.strip():
        answer += "."
    if name == "qwen3" and answer.startswith("\n"):
        pytest.skip("its template leaves lines at the beginning out")
    document = encoded(tokenizers[name], [("user", f"q {answer} q"), ("assistant", answer)])
    assert trained(tokenizers[name], document) == [answer + end_of(name)]


@pytest.mark.parametrize("name", ["qwen2.5", "mistral", "llama", "r1", "marked"])
def test_names_of_special_tokens_in_messages_stay_text(tokenizers: dict[str, Any], name: str) -> None:
    """Also of those special tokens that have no role in the tokenizer, and where the template moves a message."""
    tokenizer = tokenizers[name]
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    typed, own = f"see {special[0]}{special[-1]}", f"I {special[-1]} {special[-1]}{special[0]}, ok"
    turns = [("system", f"no {special[-1]}"), ("user", typed), ("assistant", own)]
    plain = encoded(tokenizer, [("system", "no x"), ("user", "see x"), ("assistant", "I x, ok")])
    document = encoded(tokenizer, turns)
    control = set(tokenizer.convert_tokens_to_ids(special))
    assert [i for i in document.ids.tolist() if i in control] == [i for i in plain.ids.tolist() if i in control]
    text = tokenizer.decode(document.ids)
    assert all(said in text for said in (typed, own, f"no {special[-1]}"))
    assert trained(tokenizer, document)[-1].strip() == own + end_of(name)


def test_the_marks_of_reasoning_are_tokens(tokenizers: dict[str, Any]) -> None:
    ids = encoded(tokenizers["qwen3"], [("user", "q"), ("assistant", "<think>\nr\n</think>\n\na")]).ids.tolist()
    assert {tokenizers["qwen3"].convert_tokens_to_ids(mark) for mark in ("<think>", "</think>")} <= set(ids)


@pytest.mark.parametrize(
    ("name", "turns", "reason"),
    [
        ("gemma", TWO, "refuses it: there is no system role"),
        ("gemma", [("user", "q"), *ONE], "refuses it: roles must alternate"),
        ("mistral", [("user", "q"), *ONE], "refuses it: user and assistant must take turns"),
    ],
)
def test_what_a_template_refuses(tokenizers: dict[str, Any], name: str, turns: list[tuple[str, str]], reason: str) -> None:
    with pytest.raises(LayoutError, match=reason):
        encoded(tokenizers[name], turns)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ m.content[:3] }};{% endfor %}", "does not write this answer out"),
        ("{% for m in messages %}{{ m.content | upper }};{% endfor %}", "does not write this answer out"),
        ("{% for m in messages %}{{ m.content }};{{ m.content }};{% endfor %}", "writes it 2 times"),
        ("{% for m in messages %}{{ m.role }};{% endfor %}", "writes it 0 times"),
        ("{% for m in messages %}{{ m.content }}{{ m.content | length }};{% endfor %}", "writes behind it depends on it"),
    ],
)
def test_answers_that_cannot_be_told_are_refused(byte_level: Tokenizer, template: str, reason: str) -> None:
    tokenizer = families.family("plain", byte_level)
    tokenizer.chat_template = template
    with pytest.raises(LayoutError, match=reason):
        encoded(tokenizer, ONE)


def test_a_name_of_a_special_token_cut_in_two_is_refused(byte_level: Tokenizer) -> None:
    tokenizer = families.family("qwen2.5", byte_level)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content[-12:] }};{% endfor %}"
    with pytest.raises(LayoutError, match="cuts a message inside the name of a special token"):
        encoded(tokenizer, [("user", "a name <|im_end|> of"), ("assistant", "hello")])


def test_wrong_tokens_are_found_by_decoding(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the places wrong, no document would come out: the mask is never silently another."""
    from longspec.data.chat import encoding

    right = encoding._token_at
    monkeypatch.setattr(encoding, "_token_at", lambda *given: right(*given) + 1)
    with pytest.raises(LayoutError, match="do not decode to its answers"):
        encoded(families.family("qwen2.5", byte_level), ONE)


def test_the_date_is_the_same_on_any_day(tokenizers: dict[str, Any]) -> None:
    text = ChatTemplate.of(tokenizers["llama"]).render(messages(ONE), False)[0]
    assert "Today: 26 Jul 2024\n" in text


def test_the_fixed_day_is_one_day() -> None:
    from datetime import datetime

    day = datetime(2024, 7, 26)
    assert {code: day.strftime(code) for code in chat_template.DAY} == chat_template.DAY


def test_chatml_is_the_default_and_the_log_says_so(byte_level: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = families.family("qwen2.5", byte_level)
    tokenizer.chat_template = None
    tokenizer.name_or_path = "bare"
    document = encoded(tokenizer, ONE)
    assert "bare: no chat template in this tokenizer; conversations are laid out as ChatML" in caplog.text
    assert tokenizer.decode(document.ids) == (
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\nIt is 4.<|im_end|>"
    )
    assert trained(tokenizer, document) == ["It is 4.<|im_end|>"]


def test_of_several_named_templates_the_default_is_taken(byte_level: Tokenizer) -> None:
    tokenizer = families.family("qwen2.5", byte_level)
    tokenizer.chat_template = {"default": families.QWEN25, "tool_use": families.PLAIN}
    assert chat_template.template_of(tokenizer) == families.QWEN25


def test_published_records_through_a_template(tokenizers: dict[str, Any]) -> None:
    """Every kind of conversation comes to the same messages, and so to the same tokens."""
    tokenizer = tokenizers["qwen2.5"]
    turns = [("user", "p"), ("assistant", "a")]
    records: list[dict[str, Any]] = [
        {"problem": "p", "qwq": "a"},
        {"messages": messages(turns)},
        {"source": "tulu-v2", "conversation": messages(turns)},
        {"conversations": [{"from": "human", "value": "p"}, {"from": "gpt", "value": "a"}]},
    ]
    encoder = Encoder(tokenizer)
    [first], *others = encoder.encode(encoder.plan(records))
    for [document] in others:
        assert (document.ids == first.ids).all()
        assert (document.answer_mask == first.answer_mask).all()


WORDS = [
    "a",
    "ab",
    " ",
    "\n",
    "\n\n",
    "\t",
    ".",
    "größer",
    "🙂",
    "e\u0301",
    "14",
    "<|im_end|>",
    "</s>",
    "[INST]",
    "<",
    "|",
    "▁",
    "\ue000",
]
CONTENTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=12).map("".join).filter(str.strip)


@settings(max_examples=150)
@given(
    name=st.sampled_from(["llama", "qwen2.5", "mistral", "r1", "phi", "gemma", "marked", "plain"]),
    contents=st.lists(CONTENTS, min_size=2, max_size=6),
)
def test_any_answers_come_back_from_their_tokens(tokenizers: dict[str, Any], name: str, contents: list[str]) -> None:
    """Whatever is said, names of special tokens too: the trained tokens decode to the answers as the template writes them."""
    tokenizer = tokenizers[name]
    turns = [(("user", "assistant")[n % 2], content) for n, content in enumerate(contents)]
    document = encoded(tokenizer, turns)
    stripped = name in ("llama", "gemma", "mistral")
    answers = [content.strip() if stripped else content for role, content in turns if role == "assistant"]
    texts = trained(tokenizer, document)
    if name == "plain":
        # Without end tokens; the layout's own lines and the last answer's cannot be told apart.
        assert [text.strip() for text in texts] == [answer.strip() for answer in answers[:-1]] + [texts[-1].strip()]
        assert texts[-1].removesuffix("<|endoftext|>").strip() == answers[-1].strip()
        return
    space = " " if name == "mistral" else ""
    assert texts == [f"{space}{answer}{end_of(name)}" for answer in answers]


def test_long_conversation_is_laid_out_in_bounded_time(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    """300 turns with reasoning, which no skeleton matches: each answer is found all the same."""
    turns = [turn for n in range(150) for turn in (("user", f"q{n}"), ("assistant", f"<think>\nr{n}\n</think>\n\na{n}"))]
    document = encoded(tokenizers["qwen3"], turns)
    texts = trained(tokenizers["qwen3"], document)
    assert texts == [*(f"a{n}<|im_end|>" for n in range(149)), "<think>\nr149\n</think>\n\na149<|im_end|>"]
    assert json.dumps(texts)
