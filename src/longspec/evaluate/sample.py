"""One text with what was drafted for it, round by round: the report colours it by what was kept and what was rejected."""

from typing import Any

from torch import Tensor

from longspec.decode.drafters import Drafter, DraftInput
from longspec.decode.levels import Levels
from longspec.decode.sampling import Sampler
from longspec.decode.tree import DraftTree

BEFORE = 48  # tokens of the prompt that are shown before the text
LONGEST = 200  # tokens of the text
REJECTED = 4  # rejected drafts of a place: a tree may have many children there
READ_ALONG = 16  # tokens before a token with which it is turned into text: some tokenizers drop a leading space otherwise

Token = dict[str, Any]


class Recorder:
    """A drafter whose proposals are kept. They stay on the device until the text is done, so that no time is taken for them."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.reads, self.proposed, self.copied = drafter, drafter.reads, drafter.proposed, drafter.copied
        self.acceptance = drafter.acceptance
        self.proposals: list[tuple[Tensor, Tensor]] = []

    def check(self, target: Any) -> None:
        """Have the drafter check the target. Raises ValueError as it does."""
        self.drafter.check(target)

    def begin(self, prompts: list[list[int]], hidden: dict[str, Tensor]) -> None:
        """Forget the proposals of earlier texts, and have the drafter begin."""
        self.proposals = []
        self.drafter.begin(prompts, hidden)

    def propose(self, draft_input: DraftInput, levels: Levels, sampler: Sampler) -> DraftTree:
        """Hand on the drafter's tree, and keep its tokens and parents."""
        tree = self.drafter.propose(draft_input, levels, sampler)
        self.proposals.append((tree.tokens_BS, tree.parents_BS))
        return tree

    def commit(self, tokens_BE: Tensor, kept_B: Tensor, hidden: dict[str, Tensor]) -> None:
        """Hand the kept tokens on to the drafter."""
        self.drafter.commit(tokens_BE, kept_B, hidden)

    def select(self, rows_B: Tensor) -> None:
        """Have the drafter go on with these rows alone."""
        self.drafter.select(rows_B)


class _Nodes:
    """A tree's nodes on the host."""

    def __init__(self, tokens_BS: Tensor, parents_BS: Tensor) -> None:
        self.tokens: list[int] = tokens_BS[0].tolist()
        self.children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents_BS[0].tolist()):
            if self.tokens[node] >= 0:  # one that is there
                self.children.setdefault(parent, []).append(node)

    def below(self, kept: list[int]) -> int:
        """The node at the end of the kept tokens."""
        node = 0
        for token in kept:
            node = next(child for child in self.children[node] if self.tokens[child] == token)
        return node

    def drafts(self, node: int) -> list[list[int]]:
        """Drafts below a node, as lists of tokens: one for each child, continued by the first, likeliest child of each node."""
        found = []
        for child in self.children.get(node, []):
            path = [child]
            while path[-1] in self.children:
                path.append(self.children[path[-1]][0])
            found.append([self.tokens[place] for place in path])
        return found


def sample_of(
    tokenizer: Any, prompt: list[int], ids: list[int], accepted: list[int], recorder: Recorder | None
) -> dict[str, Any]:
    """The end of the prompt as text, and of each token of the text its own text, its depth in the draft of its round (0: the
    target's own), and the texts that were drafted in its place and rejected: None where that is not known.

    ids: the text; accepted: tokens kept in each round; recorder: None for an engine that tells nothing of rejected drafts. The
    first token comes from the prompt's forward, of no round.
    """
    depths = [0, *(depth for kept in accepted for depth in (*range(1, kept + 1), 0))]
    rejected = [None] * len(depths) if recorder is None else _rejected(ids, accepted, recorder)
    whole = prompt[-BEFORE:] + ids[:LONGEST]
    start = len(whole) - len(ids[:LONGEST])
    texts = _pieces(tokenizer, whole, start)
    tokens = [
        {
            "text": text,
            "depth": depth,
            "rejected": drafts and [_added(tokenizer, whole[: start + place], draft) for draft in drafts],
        }
        for place, (text, depth, drafts) in enumerate(zip(texts, depths, rejected, strict=False))
    ]
    return {"before": tokenizer.decode(whole[:start]), "tokens": tokens}


def _rejected(ids: list[int], accepted: list[int], recorder: Recorder) -> list[list[list[int]] | None]:
    """For each token of the text the drafts in its place that were rejected."""
    rejected: list[list[list[int]] | None] = [[]]
    for kept, proposal in zip(accepted, recorder.proposals, strict=True):
        nodes, first = _Nodes(*proposal), len(rejected)
        drafts = nodes.drafts(nodes.below(ids[first : first + kept]))
        own = ids[first + kept : first + kept + 1]
        rejected += [*([] for _ in range(kept)), [draft for draft in drafts if draft[:1] != own][:REJECTED]]
    return rejected


def _pieces(tokenizer: Any, ids: list[int], start: int) -> list[str]:
    """The text of each token from `start` on; a character that several tokens make up stands with the last of them."""
    texts, begun = [], start
    for place in range(start, len(ids)):
        text = _added(tokenizer, ids[:begun], ids[begun : place + 1])
        whole = not text.endswith("\ufffd") or place + 1 == len(ids)
        texts.append(text if whole else "")
        begun = place + 1 if whole else begun
    return texts


def _added(tokenizer: Any, before: list[int], new: list[int]) -> str:
    """The text that new tokens add behind others."""
    before = before[-READ_ALONG:]
    without, together = tokenizer.decode(before), tokenizer.decode(before + new)
    same = next((place for place, (a, b) in enumerate(zip(without, together, strict=False)) if a != b), len(without))
    return str(together[same:])
