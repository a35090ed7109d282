"""Answers that a target writes in channels, as harmony's chat template (GPT-OSS) lays them out: a thought, and what is said.

<|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>final<|message|>said
"""

from collections.abc import Callable

HEAD, BETWEEN = ["<|channel|>", "<|message|>"], ["<|end|>", "<|start|>"]
OTHER = "the answer is written in other channels than analysis and final, as calls of tools are"


def writes_channels(template: str, special: tuple[str, ...]) -> bool:
    """Whether a chat template writes answers in channels; special: the names of its tokenizer's special tokens."""
    return all(mark in template and mark in special for mark in HEAD + BETWEEN)


def read(tokens: list[int], special: dict[int, str], decode: Callable[[list[int]], str]) -> tuple[str, str, str]:
    """An answer read: its text, the thought before it, and the fault that makes it no answer; each empty where there is none.

    tokens: those of an answer, less the one that ends it; one that ends within its thought says nothing. special: the names of
    special tokens.
    """
    names: list[str] = []
    runs: list[list[int]] = [[]]  # the tokens between them
    for token in tokens:
        if token in special:
            names.append(special[token])
            runs.append([])
        else:
            runs[-1].append(token)
    texts = [decode(run) for run in runs]
    if names == HEAD and texts[:2] == ["", "final"]:
        return texts[2], "", ""
    thought = texts[2] if len(texts) > 2 else ""
    whole, words = HEAD + BETWEEN + HEAD, ["", "analysis", thought, "", "assistant", "final"]
    if names == whole and texts[:6] == words:
        return texts[6], thought, ""
    is_torn = names == whole[: len(names)] and texts[:-1] == words[: len(names)]
    return "", thought, "" if is_torn and len(names) < 6 and words[len(names)].startswith(texts[-1]) else OTHER
