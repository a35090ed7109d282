"""Choose what `longspec try` asks: your question, or a held-out record of the draft's training data."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspec import jsonl
from longspec.atomic_files import read_json_object
from longspec.config import yaml_files
from longspec.data.chat.encoding import Encoder
from longspec.data.read.records import Chat, to_messages_or_text

CHARACTERS = 400  # of a text that is gone on with


@dataclass(frozen=True)
class Asked:
    """A text; is_question: the target is asked by its chat template, else it goes on with the text."""

    text: str
    is_question: bool

    def prompt(self, tokenizer: Any) -> list[int]:
        """Return the tokens that the target is given; a tokenizer without a chat template asks nothing."""
        chat = self.is_question and getattr(tokenizer, "chat_template", None) is not None
        return Encoder(tokenizer).prompt(self.text, chat=chat)


def target_of(draft: Path, given: str | None) -> str:
    """Return the folder of the target: the given one, or the one that a draft was trained for.

    Raises ValueError where it is not on this machine.
    """
    told = given or read_json_object(draft / "config.json").get("target_path") or ""
    if told and (Path(told) / "config.json").is_file():
        return str(told)
    seen = f"(seen from {Path.cwd()})"
    if given:
        raise ValueError(f"--target: {given}: has no config.json {seen}; give the target's folder")
    raise ValueError(f"{draft}: its target, {told or 'which it does not name'}, is not here {seen}; give --target FOLDER")


def asked_of(draft: Path) -> Asked:
    """Return the first held-out record of the last stage's data: a question, or the beginning of a text.

    Raises ValueError where that data is not on this machine.
    """
    settings = draft / "training_config.yaml"
    stages = yaml_files.read(settings) if settings.is_file() else {}
    for name in reversed([stage["recipe"]["data"]["name"] for stage in stages.values()]):
        path = Path("data/raw") / name / "held_out.jsonl"
        record = next(iter(jsonl.read(path)), None) if path.is_file() else None
        if record is not None:
            document = to_messages_or_text(record, unanswered=True)
            if not isinstance(document, Chat):
                return Asked(document.text[:CHARACTERS], is_question=False)
            return Asked(next(turn["content"] for turn in document.messages if turn["role"] == "user"), is_question=True)
    raise ValueError(f"{draft}: no held-out record of its data is here (seen from {Path.cwd()}); give a question in quotes")
