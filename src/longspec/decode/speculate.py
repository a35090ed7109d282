"""Speculative decoding on a transformers target and cache: draft a tree, verify it in one forward, keep one of its paths.

Shapes: B rows that still run, S nodes of a tree with its root, E = depth + 1 tokens a round can bring, V vocabulary.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longspec.decode.budget import calibrated
from longspec.decode.cache import compact, cut, keep_path, select, tokens_ahead
from longspec.decode.drafters import Drafter, DraftInput, check_drafter
from longspec.decode.levels import DEFAULT_SHAPE, Budget, Shape, levels_of, size_of
from longspec.decode.prefill import Prefilled, check_decodable, prefill
from longspec.decode.sampling import Sampler, check_drawn
from longspec.decode.texts import OnTokens, Row, Stops, Texts
from longspec.decode.tree import DraftTree
from longspec.decode.twin import ReadTarget
from longspec.decode.verify import Acceptance, verify_tree
from longspec.models.attention.backends import TARGET_ATTENTION
from longspec.models.attention.visibility import TreeVisibility
from longspec.models.target import group_of
from longspec.stopwatch import Stopwatch


@dataclass
class Decoded:
    """Hold the rows, and the seconds that all of them took together, without the prompts' own forwards."""

    rows: list[Row]
    seconds: float
    seconds_draft: float
    seconds_target: float


@torch.inference_mode()
def speculate(
    target: Any,
    drafter: Drafter,
    prompts: list[list[int]] | Prefilled,
    *,
    max_new_tokens: int,
    shape: Shape = DEFAULT_SHAPE,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eos: int | Collection[int] | None = None,
    stop_strings: Collection[str] = (),
    tokenizer: Any = None,
    on_tokens: OnTokens | None = None,
    generator: torch.Generator | None = None,
) -> Decoded:
    """Decode prompts of any lengths; greedy text is the target's own, sampled text has the target's own distribution.

    shape: tokens of a chain (int), the levels of a tree (LongSpec 3.3), or its budget; on_tokens: called with a row's number
    and its new tokens, in order; eos None: no token ends the text; generator: on the draft's device. Raises ValueError for
    settings out of range, and if target, drafter and prompts do not go together. Raises RuntimeError for a start from which
    another decoding has not ended, and for logits from which no token can be drawn.

    The target does not change: other decodings with their own drafters, and plain generate, may run on it meanwhile.

    Rows of different lengths share one left-aligned cache: a round costs each row the memory traffic of the longest one, and
    the prefix then needs a mask. Rows that have ended leave the batch. Room for max_new_tokens is made in the cache at once,
    within LONGEST_AHEAD.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: must be 1 or more, is {max_new_tokens}")
    sampler, stops = Sampler(temperature, top_k, top_p, generator, group_of(target)), Stops(eos, stop_strings, tokenizer)
    check_decodable(target)
    check_drafter(drafter, target)
    levels = levels_of(shape, target.config.vocab_size, drafter.proposed)
    nodes = size_of(levels) + drafter.copied
    ahead = tokens_ahead(max_new_tokens, nodes)
    if not isinstance(prompts, Prefilled):
        prompts = replace(prefill(target, prompts, ahead, drafter.reads), is_last=True)
    elif missing := set(drafter.reads) - set(prompts.reads):
        raise ValueError(f"prompts: prefilled without {', '.join(sorted(missing))}: give prefill(..., reads=drafter.reads)")
    with prompts.lent(ahead) as start:
        clock, read = Stopwatch(start.logits_BV.device), ReadTarget(target, TARGET_ATTENTION, drafter.reads)
        run = _Run(read, drafter, start, nodes, sampler, Texts(start.prompts, stops, max_new_tokens, on_tokens))
        clock.mark("draft")
        while run.texts.active:
            tree = drafter.propose(run.draft_input(), levels, sampler)
            clock.mark("draft")
            logits_BSV = run.forward(tree)
            clock.mark("target")
            paths = run.take(verify_tree(logits_BSV, tree, sampler).agreed(sampler), tree)
            if isinstance(levels, Budget) and tree.promised is not None:
                levels = calibrated(levels, tree.promised, paths)
            clock.mark("rest")
    seconds = clock.take()
    return Decoded(run.texts.rows, sum(seconds.values()), seconds["draft"], seconds["target"])


class _Run:
    """Hold the running rows' state on the device: the target's cache, and where each row stands in it."""

    def __init__(
        self, read: ReadTarget, drafter: Drafter, start: Prefilled, nodes: int, sampler: Sampler, texts: Texts
    ) -> None:
        self.read, self.drafter, self.texts = read, drafter, texts
        self.cache, self.nodes = start.cache, nodes
        self.lengths = [len(prompt) for prompt in start.prompts]
        self.lengths_B = torch.tensor(self.lengths, device=start.logits_BV.device)
        self.roots_B = sampler.agreed(sampler.choose(start.logits_BV))
        drafter.begin(start.prompts, start.hidden)
        if start.is_last:  # of a long prompt they take a third of the cache's memory, or more
            start.hidden.clear()
        for number, token in enumerate(self.roots_B.tolist()):
            check_drawn([token])
            texts.add(number, [token])
        self._leave_ended()

    def draft_input(self) -> DraftInput:
        """Return the rows' state at the beginning of a round."""
        texts = [self.texts.whole[number] for number in self.texts.active]
        return DraftInput(texts, tuple(self.lengths), self.lengths_B, self.roots_B, self.read.cached(self.cache))

    def forward(self, tree: DraftTree) -> Tensor:
        """Return the target's logits after each node, [B, S, V], and put the nodes' keys and values into the cache."""
        visibility = TreeVisibility(tuple(self.lengths), self.lengths_B, tree.seen_BSS, tree.depths_S, tree.depths_S)
        logits_BSV = self.read.model(
            tree.tokens_BS.clamp_min(0),  # nodes that are not there match nothing, whatever is computed for them
            position_ids=self.lengths_B[:, None] + tree.depths_S,
            past_key_values=self.cache,
            use_cache=True,
            visibility=visibility,
        ).logits
        return logits_BSV.to(self.lengths_B.device)  # of a spread target they are where the tokens of its last caller were

    def take(self, acceptance: Acceptance, tree: DraftTree) -> list[list[int]]:
        """Make the kept path text; the caches follow. Return each row's path. The round's transfer to the host is here."""
        told = (acceptance.kept_B[:, None], acceptance.tokens_BE, acceptance.path_BE)
        kept_and_tokens = torch.cat(told, dim=1).tolist()
        paths = [row[2 + tree.depth :][: row[0] + 1] for row in kept_and_tokens]
        before, before_B = self.lengths, self.lengths_B
        in_order = len(set(before)) == 1 and all(path == list(range(len(path))) for path in paths)
        self.lengths = [length + row[0] + 1 for length, row in zip(self.lengths, kept_and_tokens, strict=True)]
        self.lengths_B = before_B + acceptance.kept_B + 1
        if in_order:  # the path lies behind each row's text already
            cut(self.cache, max(self.lengths))
        elif len(paths) == 1:
            keep_path(self.cache, before[0], paths[0])
        else:
            compact(self.cache, tree.tokens_BS.shape[1], acceptance.path_BE, before_B, max(self.lengths))
        hidden = dict(self.read.hidden) if tree.is_chain else self.read.hidden_of(acceptance.path_BE)
        self.drafter.commit(acceptance.tokens_BE, acceptance.kept_B, hidden)
        self.roots_B = acceptance.tokens_BE.gather(1, acceptance.kept_B[:, None])[:, 0]
        for number, (kept, *tokens) in zip(self.texts.active, kept_and_tokens, strict=True):
            check_drawn(tokens[: kept + 1])
            self.texts.rows[number].accepted.append(self.texts.add(number, tokens[: kept + 1]))
        self._leave_ended()
        return paths

    def _leave_ended(self) -> None:
        """Go on without the rows whose text has ended; the others' caches are then copied once."""
        stay = [place for place, number in enumerate(self.texts.active) if not self.texts.rows[number].finish]
        if len(stay) == len(self.texts.active):
            return
        self.texts.active = [self.texts.active[place] for place in stay]
        if not stay:
            return
        rows_B = torch.tensor(stay, device=self.lengths_B.device)
        self.lengths = [self.lengths[place] for place in stay]
        self.lengths_B, self.roots_B = self.lengths_B[rows_B], self.roots_B[rows_B]
        to_come = self.texts.max_new_tokens - min(len(self.texts.rows[number].ids) for number in self.texts.active)
        select(self.cache, rows_B, max(self.lengths), tokens_ahead(to_come, self.nodes))
        self.drafter.select(rows_B)
