"""One prompt, decoded plainly and with drafts, both on the same cache of its prompt: a line of the results."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from longspec.atomic_files import sha256_text
from longspec.chain_length import LONGEST
from longspec.decode.autoregressive import Plain, decode_plain
from longspec.decode.cache import tokens_ahead
from longspec.decode.chain_costs import measure_costs
from longspec.decode.drafters import Drafter
from longspec.decode.levels import levels_of
from longspec.decode.prefill import Prefilled, prefill
from longspec.decode.sampling import Sampler
from longspec.decode.speculate import Decoded, Row, speculate
from longspec.evaluate.losslessness import Comparison, compare
from longspec.evaluate.sample import sample_of
from longspec.evaluate.tasks import Prompt, Setting
from longspec.journal import Followed, Journal

Line = dict[str, Any]
Work = dict[str, tuple[Prompt, Setting]]  # by key_text
KEY = ("task", "prompt", "temperature", "shape", "prompt_hash")  # fields that identify a line of the results


@dataclass(frozen=True)
class Measurer:
    """Measures a drafter on prompts.

    eos: tokens that end a text; repeats: runs of each prompt; seed: that of all draws; with_costs: the first prompt of each
    task tells too what rounds with chains of each length cost.
    """

    target: Any
    tokenizer: Any
    drafter: Drafter
    eos: Collection[int]
    repeats: int
    seed: int
    with_costs: bool = False

    def lines(self, work: Work, journal: Journal | Followed) -> dict[str, Line]:
        """A line for each prompt and setting, by its key; in the journal as soon as it is measured."""
        for setting in {setting: None for _, setting in work.values()}:  # its first times are those of a cold start
            self.line(next(prompt for prompt, other in work.values() if other == setting), setting)
        found = {}
        for key, item in work.items():
            found[key] = self.line(*item)
            journal.append(found[key])
        return found

    def line(self, prompt: Prompt, setting: Setting) -> Line:
        """Decode and compare. Seconds are the medians of the repeats, the lower of two; the prompt's forward is not in them.

        The first prompt of a task keeps what was drafted for it too.

        Raises ValueError when greedy output is not the target's own up to near-ties.
        """
        levels = levels_of(setting.shape, self.target.config.vocab_size, self.drafter.proposed)
        ahead = tokens_ahead(prompt.new_tokens + 1, sum(levels) + self.drafter.copied)
        start = prefill(self.target, [prompt.ids], ahead, self.drafter.reads)
        plain, decoded = self._pair(start, prompt, setting, 0)
        (fast,) = decoded.rows
        verdict = compare(plain, fast.ids) if setting.temperature == 0 else Comparison(0, 0, 0)
        refuse_fault(prompt, setting, verdict, plain, fast.ids)
        runs = [(plain, decoded)]
        for repeat in range(1, self.repeats):
            runs[-1][0].logits.clear()  # a vocabulary for each token
            runs.append(self._pair(start, prompt, setting, repeat))
        # All speculative times are of the one repeat with the median total, so that draft and target time add up to it.
        decoded = sorted((decoded for _, decoded in runs), key=lambda run: run.seconds)[(self.repeats - 1) // 2]
        plain = sorted((plain for plain, _ in runs), key=lambda run: run.seconds)[(self.repeats - 1) // 2]
        seconds = {
            "seconds_speculative": decoded.seconds,
            "seconds_draft": decoded.seconds_draft,
            "seconds_target": decoded.seconds_target,
        }
        line = line_of(prompt, setting, fast, verdict, plain.seconds / max(1, len(plain.ids) - 1), seconds)
        if prompt.number == 0:
            line["sample"] = sample_of(self.tokenizer, prompt.ids, fast.ids, fast.accepted)
            if self.with_costs and setting.temperature == 0 and isinstance(setting.shape, int):
                line["seconds_by_chain"] = vars(measure_costs(self.target, self.drafter, start, min(setting.shape, LONGEST)))
        return line

    def _pair(self, start: Prefilled, prompt: Prompt, setting: Setting, repeat: int) -> tuple[Plain, Decoded]:
        """Both ways once; which one is first changes with each repeat. Every repeat draws the same tokens."""
        if repeat % 2:
            decoded = self._speculative(start, prompt, setting)
            return self._plain(start, prompt, setting), decoded
        return self._plain(start, prompt, setting), self._speculative(start, prompt, setting)

    def _plain(self, start: Prefilled, prompt: Prompt, setting: Setting) -> Plain:
        sampler = Sampler(setting.temperature, generator=self._generator(prompt, setting))
        return decode_plain(self.target, start, prompt.new_tokens + 1, self.eos, sampler)  # the prompt's forward brings one

    def _speculative(self, start: Prefilled, prompt: Prompt, setting: Setting) -> Decoded:
        return speculate(
            self.target,
            self.drafter,
            start,
            max_new_tokens=prompt.new_tokens + 1,
            shape=setting.shape,
            temperature=setting.temperature,
            eos=self.eos,
            generator=self._generator(prompt, setting),
        )

    def _generator(self, prompt: Prompt, setting: Setting) -> torch.Generator:
        """Draws that depend on what is decoded alone, so that an evaluation that was killed ends in the same texts."""
        name = f"{self.seed} {prompt.task} {prompt.number} {setting}"
        return torch.Generator(self.target.device).manual_seed(int(sha256_text(name)[:15], 16))


def key_of(prompt: Prompt, setting: Setting) -> Line:
    """The fields of KEY."""
    shape = setting.shape if isinstance(setting.shape, int) else list(setting.shape)
    return dict(zip(KEY, (prompt.task, prompt.number, setting.temperature, shape, prompt.hash), strict=True))


def line_of(prompt: Prompt, setting: Setting, row: Row, verdict: Comparison, plain: float, seconds: dict[str, Any]) -> Line:
    """A line of the results. plain: seconds of a token by plain decoding; seconds: the fields that tell of the speculative."""
    return {
        **key_of(prompt, setting),
        "record": prompt.record,
        "context_tokens": len(prompt.ids),
        "cut_tokens": prompt.cut_tokens,
        "new_tokens": row.new_tokens,
        "rounds": row.rounds,
        "accepted": row.accepted,
        "positions": row.position_acceptance(setting.depth),
        "acceptance_length": row.new_tokens / max(1, row.rounds),
        **vars(verdict),
        # Scaled to as many tokens: the last speculative round may bring more than were asked for.
        "seconds_plain": plain * row.new_tokens,
        **seconds,
        "tokens": row.ids,
        "reference": prompt.reference,
    }


def key_text(line: Line) -> str:
    """The fields of KEY of a line as one text."""
    return json.dumps([line.get(name) for name in KEY])


def refuse_fault(prompt: Prompt, setting: Setting, verdict: Comparison, plain: Plain, fast: list[int]) -> None:
    """Raise ValueError when the text differs from plain decoding by more than a near-tie."""
    if verdict.mismatches > verdict.near_ties:
        place = verdict.tokens_compared
        if verdict.margin is None:
            why = "one text ends before the other"
        else:
            why = f"the target's logits of the two lie {verdict.margin:.3g} apart, a tie's {verdict.margin_allowed:.3g} at most"
        raise ValueError(
            f"{prompt.task}, prompt {prompt.number}, {setting}: other tokens than plain decoding at token {place} "
            f"({plain.ids[place - 1 : place]} became {fast[place - 1 : place]}; {why}): decoding is not lossless"
        )
