"""Estimate acceptance on held-out text while a stage trains. This draws no random number and leaves no gradient.

Shapes: S tokens of a row.
"""

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import torch
import torch.distributed as dist

from longspec.config import Recipe, Runtime
from longspec.data.pack.arrow_shards import PackedRows
from longspec.data.pack.held_out_rows import held_out_rows
from longspec.distributed import Ranks, log
from longspec.methods import method_of
from longspec.models.losses import NO_LABEL


class HeldOut:
    """Measure every `runtime.held_out_every` steps and after the last one, always on the same rows of each data set.

    Raises ValueError if measuring is asked for and there are no held-out records.
    """

    def __init__(self, own: Sequence[PackedRows], recipe: Recipe, runtime: Runtime, ranks: Ranks, steps: int) -> None:
        self.every, self.ranks, self.steps = runtime.held_out_every, ranks, steps
        method, settings = method_of(recipe)
        self.drafted, self.arguments = method.drafted_steps(settings), method.each_step(settings)
        self.of_each = [held_out_rows(rows, runtime.held_out_rows) for rows in own] if self.every else []
        self.rows = [row for rows in self.of_each for row in rows]
        if self.every:
            log(f"acceptance on {len(self.rows)} held-out rows is estimated every {self.every} steps", ranks)

    def estimate(self, engine: Any, step: int, begin_row: Callable[[], None] = lambda: None) -> dict[str, float] | None:
        """Measure after step `step`, counted from 1, on all ranks; None if none is due. begin_row: called before each row.

        acceptance_k: among the labels that step k of drafting reaches, the share at which draft and target prefer the same next
        token; absent if it reaches none. expected_tokens = 1 + a_1 + a_1 a_2 + ...: tokens per round of a chain, if acceptance
        does not depend on the text before. loss: the draft's in the first step, nats per label that it can learn, if any.
        """
        if not self.every or (step % self.every and step != self.steps):
            return None
        began, was_training = time.perf_counter(), engine.training
        sums = torch.zeros(2, self.drafted + 1, device=engine.device)  # agreements by step, and loss; labels of each
        engine.eval()
        # Every rank runs as many forwards, since ZeRO-3 gathers weights in them; rows beyond the last count nothing.
        for start in range(0, len(self.rows), self.ranks.world_size):
            begin_row()
            sums += self._measure(engine, start + self.ranks.rank)
        engine.train(was_training)
        dist.all_reduce(sums)
        (*agreements, loss), (*reached, labels) = sums.tolist()
        shares = [agreement / count for agreement, count in zip(agreements, reached, strict=True) if count]
        named = {f"acceptance_{number}": share for number, share in enumerate(shares, 1)}
        named |= {"expected_tokens": 1 + sum(accumulate(shares, mul))} | ({"loss": loss / labels} if labels else {})
        return named | {"seconds": time.perf_counter() - began}

    @torch.no_grad()
    def _measure(self, engine: Any, number: int) -> torch.Tensor:
        """Return the sums of one row over those labels, [2, steps + 1]; zeros after the last row."""
        place = min(number, len(self.rows) - 1)
        row = self.rows[place]
        input_ids_1S = torch.from_numpy(row.input_ids_S)[None].to(engine.device).long()
        is_label_1S = torch.from_numpy(row.loss_mask_S > 0)[None].to(engine.device)
        if number >= len(self.rows):
            is_label_1S = torch.zeros_like(is_label_1S)
        labels_1S = input_ids_1S.masked_fill(~is_label_1S, NO_LABEL)
        numbers_1 = torch.tensor([~place])  # as StoredStates numbers held-out rows: -1, -2, ...
        output = engine(input_ids=input_ids_1S, labels=labels_1S, row_numbers=numbers_1, **self.arguments)
        all_K = is_label_1S.sum().expand(self.drafted)
        reached_K, inside_K = (all_K if found is None else found for found in (output.reached, output.inside))
        labels = torch.cat([reached_K, inside_K[:1]]).float()
        return torch.stack([torch.cat([output.agreement, output.loss[:1]]) * labels, labels])
