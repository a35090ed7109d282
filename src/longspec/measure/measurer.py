"""Decode a prompt plainly and with drafts, both on the same cache of the prompt, and make lines of results."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import median_low
from typing import Any

import torch

from longspec.atomic_files import sha256_text
from longspec.decode.autoregressive import Plain, decode_plain, near_tie_margin
from longspec.decode.cache import tokens_ahead
from longspec.decode.drafters import Drafter
from longspec.decode.levels import size_of
from longspec.decode.prefill import prefill
from longspec.decode.sampling import Sampler
from longspec.decode.speculate import Decoded, speculate
from longspec.decode.texts import Row
from longspec.journal import Journal
from longspec.measure.lines import SECONDS, Comparison, Gap, Line, Work, key_of, verdict_of
from longspec.measure.sample import sample_of
from longspec.measure.tasks import Prompt, Setting


@dataclass(frozen=True)
class Measurer:
    """Measure a drafter on prompts.

    eos: tokens that end a text; repeats: runs of each prompt; seed: of all random draws.
    """

    target: Any
    drafter: Drafter
    eos: Collection[int]
    tokenizer: Any
    repeats: int
    seed: int

    def lines(self, work: Work, journal: Journal) -> dict[str, Line]:
        """Return a line for each prompt and setting, by its key; the journal gets them after each prompt and temperature."""
        for setting in {setting: None for _, setting in work.values()}:  # warm-up: the first times of a setting are slow
            first = next(prompt for prompt, other in work.values() if other == setting)
            replace(self, repeats=1).measure(first, [setting])
        found = {}
        for _, same in groupby(work.items(), key=lambda each: key_of(*each[1], drafted=False)):
            keys, items = zip(*same, strict=True)
            for key, line in zip(keys, self.measure(items[0][0], [setting for _, setting in items]), strict=True):
                found[key] = line
                journal.append(line)
        return found

    def measure(self, prompt: Prompt, settings: list[Setting]) -> list[Line]:
        """Return a line for each setting; all have one temperature, so the text without draft is decoded once for all.

        A repeat decodes plainly, then with each setting; every second repeat in reverse order. Seconds are medians (of two, the
        lower one) and exclude the prompt's forward.

        Raises ValueError if greedy output differs from the target's own by more than near-ties.
        """
        nodes = max(size_of(each.shape) for each in settings)
        ahead = tokens_ahead(prompt.new_tokens + 1, nodes + self.drafter.copied)
        start = prefill(self.target, [prompt.ids], ahead, self.drafter.reads)
        temperature, seconds_plain = settings[0].temperature, list[float]()
        runs: dict[Setting, list[Decoded]] = {setting: [] for setting in settings}
        for repeat in range(self.repeats):
            for setting in [None, *settings][:: -1 if repeat % 2 else 1]:
                if setting is None:
                    sampler = Sampler(temperature, generator=self._generator(prompt, f"temperature {temperature:g}"))
                    # The prompt's forward yields one token more than was asked for.
                    compared = repeat == 0 and temperature == 0
                    plain = decode_plain(self.target, start, prompt.new_tokens + 1, self.eos, sampler, keep_logits=compared)
                    continue
                options: dict[str, Any] = {"shape": setting.shape, "temperature": temperature, "eos": self.eos}
                options |= {"max_new_tokens": prompt.new_tokens + 1, "generator": self._generator(prompt, str(setting))}
                runs[setting].append(speculate(self.target, self.drafter, start, **options))
            if repeat == 0:  # the other repeats draw the same tokens
                texts = {setting: runs[setting][0].rows[0].ids for setting in settings}
                verdicts = {each: verdict_of(prompt, each, plain.ids, ids, gap_of(plain)) for each, ids in texts.items()}
            plain.logits.clear()  # one vocabulary of numbers for each token
            seconds_plain.append(plain.seconds)
        of_token = median_low(seconds_plain) / max(1, len(plain.ids) - 1)
        found = []
        for setting, ran in runs.items():
            # All times of a line come from the repeat with the median total, so that they add up to it.
            decoded = sorted(ran, key=lambda run: run.seconds)[(self.repeats - 1) // 2]
            seconds = (decoded.seconds, decoded.seconds_draft, decoded.seconds_target)
            found.append(line_of(self.tokenizer, prompt, setting, decoded.rows[0], verdicts[setting], of_token, seconds))
        return found

    def _generator(self, prompt: Prompt, setting: str) -> torch.Generator:
        """Return a generator seeded by prompt and setting alone, so that a resumed evaluation decodes the same texts."""
        name = f"{self.seed} {prompt.task} {prompt.number} {setting}"
        return torch.Generator(self.target.device).manual_seed(int(sha256_text(name)[:15], 16))


def gap_of(plain: Plain) -> Gap:
    """Return a function: the distance of two logits of plain decoding, and how far rounding may move them in this dtype."""

    def gap(place: int, own: int, other: int) -> tuple[float, float]:
        logits_V = plain.logits[place]
        return float(logits_V[own] - logits_V[other]), near_tie_margin(logits_V)

    return gap


def line_of(
    tokenizer: Any, prompt: Prompt, setting: Setting, row: Row, verdict: Comparison, plain: float, seconds: tuple[Any, ...]
) -> Line:
    """Return a line of results; the line of a task's first prompt also keeps what was drafted, for the report's sample.

    plain: seconds per token of plain decoding; seconds: speculative, then draft and target, None if unknown.
    """
    sample = {"sample": sample_of(tokenizer, prompt.ids, row.ids, row.accepted)} if prompt.number == 0 else {}
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
        # Scaled to the speculative text's tokens: its last round may bring more than were asked for.
        **dict(zip(SECONDS, (plain * row.new_tokens, *seconds), strict=True)),
        "tokens": row.ids,
        "reference": prompt.reference,
    } | sample
