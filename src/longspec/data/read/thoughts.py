"""The marks between which a reasoning model writes its thought inside an answer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Marks:
    """What opens and what closes a thought; `form` has them as the model writes them, around {thought} and before {said}."""

    opener: str
    closer: str
    form: str

    def written(self, thought: str, said: str) -> str:
        """A content that begins with a thought."""
        return self.form.format(thought=thought, said=said)


THINK = Marks("<think>", "</think>", "<think>\n{thought}\n</think>\n\n{said}")
MARKS = (THINK, Marks("[THINK]", "[/THINK]", "[THINK]{thought}[/THINK]{said}"))  # the second: Magistral's


def opened_at_end(prompt: str) -> Marks | None:
    """The marks of a thought that a prompt leaves open at its very end; None where it opens none."""
    return next((marks for marks in MARKS if prompt.rstrip().endswith(marks.opener)), None)


def opened_at_start(content: str) -> Marks | None:
    """The marks of a thought with which a content begins; None for a content that begins with none."""
    return next((marks for marks in MARKS if content.lstrip().startswith(marks.opener)), None)


def closes_one(content: str) -> bool:
    """Whether a thought ends somewhere in a content."""
    return any(marks.closer in content for marks in MARKS)


def apart(content: str) -> tuple[str, str] | None:
    """The thought that begins a content, and what is said behind it; None for a content that begins with no whole thought.

    The opening mark may be missing, since many prompts end with it.
    """
    opened = opened_at_start(content)
    for marks in [opened] if opened else MARKS:
        thought, closer, said = content.partition(marks.closer)
        if closer and (opened or marks.opener not in thought):
            return thought.lstrip().removeprefix(marks.opener).strip("\n"), said.lstrip("\n")
    return None
