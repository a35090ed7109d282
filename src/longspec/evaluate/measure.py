"""One prompt, decoded plainly and with drafts, both on the same cache of its prompt: a line of the results."""

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import median_low
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
from longspec.decode.speculate import Decoded, speculate
from longspec.decode.texts import Row
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
        """A line for each prompt and setting, by its key; in the journal as soon as a prompt is measured at its temperature."""
        for setting in {setting: None for _, setting in work.values()}:  # its first times are those of a cold start
            first = next(prompt for prompt, other in work.values() if other == setting)
            replace(self, repeats=1, with_costs=False).measure(first, [setting])
        found = {}
        for _, same in groupby(work.items(), key=lambda each: plain_key(*each[1])):
            keys, items = zip(*same, strict=True)
            for key, line in zip(keys, self.measure(items[0][0], [setting for _, setting in items]), strict=True):
                found[key] = line
                journal.append(line)
        return found

    def measure(self, prompt: Prompt, settings: list[Setting]) -> list[Line]:
        """A line for each of the settings, which have one temperature: the text without draft is decoded once for all.

        A repeat decodes it, then by each setting; every second one in the reverse order. Seconds are the medians, the lower of
        two; the prompt's forward is not in them. The first prompt of a task keeps what was drafted for it too.

        Raises ValueError when greedy output is not the target's own up to near-ties.
        """
        levels = [levels_of(each.shape, self.target.config.vocab_size, self.drafter.proposed) for each in settings]
        ahead = tokens_ahead(prompt.new_tokens + 1, max(map(sum, levels)) + self.drafter.copied)
        start = prefill(self.target, [prompt.ids], ahead, self.drafter.reads)
        temperature, seconds_plain = settings[0].temperature, list[float]()
        runs: dict[Setting, list[Decoded]] = {setting: [] for setting in settings}
        for repeat in range(self.repeats):
            for setting in [None, *settings][:: -1 if repeat % 2 else 1]:
                if setting is None:
                    sampler = Sampler(temperature, generator=self._generator(prompt, f"temperature {temperature:g}"))
                    # The prompt's forward brings a token beside those that are asked for.
                    plain = decode_plain(self.target, start, prompt.new_tokens + 1, self.eos, sampler)
                else:
                    runs[setting].append(self._speculative(start, prompt, setting))
            if repeat == 0:  # the others draw the same tokens
                verdicts = {setting: verdict_of(prompt, setting, plain, runs[setting][0]) for setting in settings}
            plain.logits.clear()  # a vocabulary for each token
            seconds_plain.append(plain.seconds)
        of_token = median_low(seconds_plain) / max(1, len(plain.ids) - 1)
        return [self._line(start, prompt, each, verdicts[each], of_token, runs[each]) for each in settings]

    def _line(
        self, start: Prefilled, prompt: Prompt, setting: Setting, verdict: Comparison, plain: float, runs: list[Decoded]
    ) -> Line:
        """The line of one setting. All its times are of the repeat with the median total, so that they add up to it."""
        decoded = sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]
        (fast,) = decoded.rows
        seconds = {
            "seconds_speculative": decoded.seconds,
            "seconds_draft": decoded.seconds_draft,
            "seconds_target": decoded.seconds_target,
        }
        line = line_of(prompt, setting, fast, verdict, plain, seconds)
        if prompt.number == 0:
            line["sample"] = sample_of(self.tokenizer, prompt.ids, fast.ids, fast.accepted)
            if self.with_costs and setting.temperature == 0 and isinstance(setting.shape, int):
                line["seconds_by_chain"] = vars(measure_costs(self.target, self.drafter, start, min(setting.shape, LONGEST)))
        return line

    def _speculative(self, start: Prefilled, prompt: Prompt, setting: Setting) -> Decoded:
        return speculate(
            self.target,
            self.drafter,
            start,
            max_new_tokens=prompt.new_tokens + 1,
            shape=setting.shape,
            temperature=setting.temperature,
            eos=self.eos,
            generator=self._generator(prompt, str(setting)),
        )

    def _generator(self, prompt: Prompt, setting: str) -> torch.Generator:
        """Draws that depend on what is decoded alone, so that an evaluation that was killed ends in the same texts."""
        name = f"{self.seed} {prompt.task} {prompt.number} {setting}"
        return torch.Generator(self.target.device).manual_seed(int(sha256_text(name)[:15], 16))


def key_of(prompt: Prompt, setting: Setting) -> Line:
    """The fields of KEY."""
    shape = setting.shape if isinstance(setting.shape, int) else list(setting.shape)
    return dict(zip(KEY, (prompt.task, prompt.number, setting.temperature, shape, prompt.hash), strict=True))


def plain_key(prompt: Prompt, setting: Setting) -> str:
    """As of key_text, of a text without draft, which has no shape."""
    return key_text(key_of(prompt, setting) | {"shape": None})


def verdict_of(prompt: Prompt, setting: Setting, plain: Plain, decoded: Decoded) -> Comparison:
    """How the text compares with that without draft. Raises ValueError when greedy text differs by more than a near-tie."""
    (fast,) = decoded.rows
    verdict = compare(plain, fast.ids) if setting.temperature == 0 else Comparison(0, 0, 0)
    refuse_fault(prompt, setting, verdict, plain, fast.ids)
    return verdict


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
