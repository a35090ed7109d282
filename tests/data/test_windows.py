"""Long texts tokenized in windows: the tokens, places and masks are those of the whole."""

import random
from typing import Any

import pytest

from longspec.data.chat import windows
from longspec.data.chat.encoding import Encoder
from longspec.data.chat.special_tokens import LayoutError
from tests.data import families

ALPHABET = [*"abcdefgh   ...\n\n()=_1234567890é数🙂\t", "the ", "word ", "x = 3 ** 2\n", "    return ", "<|im_end|>"]
ALPHABET += ["e\u0301", "\u200b"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of a few sentences."""
    for name, size in (("WINDOW", 700), ("UNSURE", 40), ("SHARED", 60), ("AGREED", 16)):
        monkeypatch.setattr(windows, name, size)


def texts(count: int) -> list[str]:
    draw = random.Random(3)
    return ["".join(draw.choices(ALPHABET, k=draw.randrange(1500, 4000))) for _ in range(count)]


@pytest.fixture(scope="module", params=["byte_level", "spaces_in_words"])
def backend(request: pytest.FixtureRequest) -> Any:
    return getattr(families, request.param)()


def test_tokens_and_places_are_those_of_the_whole(backend: Any) -> None:
    tokenizer = families.family("qwen2.5", backend).backend_tokenizer
    for text in [*texts(20), "a" * 5000, "12345" * 800, "ab" * 3000 + "\n" + "cd " * 900]:
        whole = tokenizer.encode(text, add_special_tokens=False)
        made = windows.tokenize(lambda stretch: tokenizer.encode(stretch, add_special_tokens=False), text)
        assert made.ids == whole.ids
        assert list(zip(made.starts_N.tolist(), made.ends_N.tolist(), strict=True)) == whole.offsets
        for place in range(0, len(text), 7):
            token = whole.char_to_token(place)
            assert made.char_to_token(place) == token
            assert token is None or made.token_to_chars(token) == whole.token_to_chars(token)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_documents_are_those_of_the_whole(name: str, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder(families.family(name, backend))
    draw = texts(9)
    records: list[dict[str, Any]] = [
        {"text": draw[0]},
        {"source": draw[1], "target": draw[2]},
        {"problem": draw[3][:50], "qwq": draw[4]},
        {
            "messages": [
                {"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, draw[5:], strict=False)
            ]
        },
    ]
    plans = encoder.plan(records)
    made = encoder.encode(plans)
    monkeypatch.setattr(windows, "WINDOW", 10**9)
    for in_windows, as_whole in zip(made, encoder.encode(plans), strict=True):
        assert isinstance(in_windows, LayoutError) == isinstance(as_whole, LayoutError)
        if not isinstance(in_windows, LayoutError):
            [one], [whole] = in_windows, as_whole
            assert one.ids.tolist() == whole.ids.tolist()
            assert one.answer_mask.tolist() == whole.answer_mask.tolist()
    assert not isinstance(made[0], LayoutError)  # answers with characters unknown to a tokenizer are refused either way


def test_what_a_tokenizer_adds_to_a_text_is_added_once(tokenizer: Any) -> None:
    from tokenizers import Tokenizer, processors

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    ids = {name: backend.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>")}
    backend.post_processor = processors.TemplateProcessing("<|im_start|> $A <|im_end|>", None, list(ids.items()))
    text = texts(1)[0]
    made = windows.tokenize(lambda stretch: backend.encode(stretch, add_special_tokens=False), text)
    assert windows.framed(made, backend.encode("x"), len(text)).ids == backend.encode(text).ids


def test_a_text_whose_parts_disagree_is_tokenized_whole(tokenizer: Any) -> None:
    """Nothing is guessed, even of a tokenizer that looks at where its text begins."""

    class Fickle:
        """Its tokens are the places of its text's characters."""

        def __init__(self, text: str) -> None:
            self.ids = list(range(len(text)))
            self.offsets = [(place, place + 1) for place in range(len(text))]

    assert windows.tokenize(Fickle, "x" * 2000).ids == list(range(2000))
