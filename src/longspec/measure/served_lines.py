"""Lines of the results from the answers of vLLM: the fields of measurer.py, by vLLM's own counters."""

from dataclasses import asdict, dataclass
from statistics import median_low
from typing import Any

import torch

from longspec.atomic_files import sha256_text
from longspec.decode.autoregressive import near_tie_margin
from longspec.decode.texts import LENGTH, STOP, Row
from longspec.journal import Followed, Journal
from longspec.measure.engines.protocol import Answer, Request
from longspec.measure.lines import Comparison, Line, Work, judge, key_of, key_text, plain_key, refuse_fault
from longspec.measure.measurer import line_of
from longspec.measure.served import Engine
from longspec.measure.tasks import VLLM, Prompt, Setting

# Two logits of float32 that lie closer than this are a tie: kernels sum in another order for one token than for several.
TIE_FLOAT32 = 1e-4
BEST = 8  # tokens whose logits are told at each place of the text without draft
PLAIN = "plain"  # field of a journal's line that holds an answer without draft


@dataclass(frozen=True)
class ServedMeasurer:
    """Measures a served drafter. eos: tokens that end a text; seed: of all draws."""

    engine: Engine
    tokenizer: Any
    eos: list[int]
    seed: int

    def lines(self, work: Work, journal: Journal | Followed) -> dict[str, Line]:
        """Return a line for each prompt and setting, by its key; the journal has each at once, and each text without draft.

        vLLM is started once without draft, then once for each number of drafted tokens, where there is something to ask. Raises
        ValueError when greedy text with drafts is not that without.
        """
        plain, found = self._plain(work, journal), {}
        for tokens in dict.fromkeys(setting.shape for _, setting in work.values()):
            assert isinstance(tokens, int), "measure.tasks refuses trees"
            items = {key: item for key, item in work.items() if item[1].shape == tokens}
            for answer in self.engine.ask(tokens, [self._request(key, *item, best=0) for key, item in items.items()]):
                prompt, setting = items[answer.id]
                found[answer.id] = self.line(prompt, setting, plain[plain_key(prompt, setting)], answer)
                journal.append(found[answer.id])
        return found

    def _plain(self, work: Work, journal: Journal | Followed) -> dict[str, Answer]:
        """Return the texts without draft, by their keys."""
        known = {key_text(line): Answer(**line[PLAIN]) for line in journal.lines or [] if PLAIN in line}
        missing = {key: item for item in work.values() if (key := plain_key(*item)) not in known}
        requests = [self._request(key, *item, best=BEST) for key, item in missing.items()]
        for answer in self.engine.ask(None, requests) if requests else ():
            known[answer.id] = answer
            journal.append({**key_of(*missing[answer.id]), "shape": None, PLAIN: asdict(answer)})
        return known

    def _request(self, key: str, prompt: Prompt, setting: Setting, best: int) -> Request:
        seed = int(sha256_text(f"{self.seed} {key}")[:15], 16)
        told = best if setting.temperature == 0 else 0
        # The prompt's forward brings a token beside those that are asked for, as in measurer.py.
        return Request(key, prompt.ids, prompt.new_tokens + 1, setting.temperature, seed, self.eos, told)

    def line(self, prompt: Prompt, setting: Setting, plain: Answer, answer: Answer) -> Line:
        """Return a line with the fields of measurer.py; vLLM does not tell the seconds of draft and target apart: None."""
        assert isinstance(setting.shape, int)
        uncut = Row(answer.tokens, accepted_of(answer), LENGTH)
        check_counters(prompt, answer, [kept for kept, _ in uncut.position_acceptance(setting.shape)])
        row = self._ended(uncut, answer)
        verdict = Comparison(0, 0, 0)
        if setting.temperature == 0:
            verdict = compare(plain, answer, self.engine.target.dtype)
        refuse_fault(prompt, setting, verdict, plain.tokens, answer.tokens)
        seconds = {"seconds_speculative": median_low(answer.seconds), "seconds_draft": None, "seconds_target": None}
        plain_seconds = median_low(plain.seconds) / max(1, len(plain.tokens) - 1)
        return line_of(self.tokenizer, prompt, setting, row, verdict, plain_seconds, seconds) | {"engine": VLLM}

    def _ended(self, uncut: Row, answer: Answer) -> Row:
        """Return the row as decode.speculate counts it: tokens kept behind the one that ends the text are no text."""
        if answer.tokens[-1] not in self.eos:
            return uncut
        last = [answer.steps[-1] - 1] if uncut.accepted else []
        return Row(uncut.ids, [*uncut.accepted[:-1], *last], STOP)


def accepted_of(answer: Answer) -> list[int]:
    """Return the drafted tokens kept in each round: a step's tokens less the target's own; the prompt's step is no round.

    The last round is told uncut. Its text may be cut, where it ends or has as many tokens as were asked for: vLLM's counter
    says how many of its drafted tokens were kept, less those of the other rounds.
    """
    if not answer.steps[1:]:
        return []
    whole = [size - 1 for size in answer.steps[1:-1]]
    return [*whole, answer.accepted - sum(whole)]


def check_counters(prompt: Prompt, answer: Answer, kept: list[int]) -> None:
    """Raise ValueError where vLLM's counters by place are not those that the engine's steps give: one is misread then."""
    counted = answer.accepted_by_place or [0] * len(kept)
    if kept != counted:
        raise ValueError(
            f"{prompt.task}, prompt {prompt.number}: vLLM's counter vllm:spec_decode_num_accepted_tokens_per_pos grew by "
            f"{counted}, its steps give {kept}: what this version counts is not known here; install the one of "
            "serve-requirements.txt, by `make .venv-serve/.stamp`"
        )


def compare(plain: Answer, answer: Answer, dtype: torch.dtype) -> Comparison:
    """Compare with the text without draft, of which the likeliest tokens' logits are known.

    Near-ties: of float32 those within TIE_FLOAT32; in half precision vLLM's logits are rounded to the dtype, so that four
    roundings at the size of the largest are allowed, as of decode.autoregressive.near_tie_margin. The largest is here that
    of the likeliest tokens alone, there that of all, by magnitude: where an unlikely token's logit is the largest, far below 0,
    this allows less than measurer.compare does.
    """

    def gap(place: int, own: int, other: int) -> tuple[float, float]:
        logits = dict(plain.best[place])
        values = list(logits.values())
        allowed = TIE_FLOAT32 if dtype == torch.float32 else near_tie_margin(torch.tensor(values, dtype=dtype))
        # Of a token that is not among the likeliest it is only known that it lies below all of them.
        margin = logits[own] - logits[other] if other in logits else max(logits[own] - min(values), 2 * allowed)
        return margin, allowed

    return judge(plain.tokens, answer.tokens, gap)
