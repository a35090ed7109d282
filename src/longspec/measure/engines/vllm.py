"""Decode one request at a time with vLLM, and read its counters for each. Only this module uses vLLM.

    python -m longspec.measure.engines.vllm JOB        in an environment that has vLLM

Requests run alone, step by step: then a step's tokens are those of one round, and the counters grow by this request alone.
"""

import json
import os
import time
from dataclasses import replace
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

from longspec.measure.engines.protocol import Answer, Job, Request, run

# Set before vLLM is imported; values that the user has set stay. No network, no usage statistics. On a CPU: one thread bound to
# no core (bound threads slow down everything else there), one GiB of keys and values, one process.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
# The plugin refuses vLLM's second model runner, the default on GPUs.
OF_METHOD: dict[str | None, dict[str, str]] = {"draft_model": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}
PLUGIN = "longspec-vllm"
INSTALL = "`make .venv-serve/vllm/.stamp` installs it, or `pip install --no-deps plugins/vllm` by the pip of that environment"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
BY_PLACE = "vllm:spec_decode_num_accepted_tokens_per_pos"


def check_on_cpu(draft: str | Path) -> None:
    """Raise ValueError, with the recipe's key, for a draft folder that vLLM computes wrongly on a CPU."""
    settings = json.loads((Path(draft) / "config.json").read_text(encoding="utf-8")).get("settings") or {}
    if settings.get("tied_k_norm") is False and settings["depth"] > 1:
        raise ValueError(
            f"{draft}: recipe.method.tied_k_norm: false: on a CPU vLLM 0.32 norms the text's keys of all layers by the first "
            "layer's weight, and keeps fewer drafts; train with true, or serve this draft by llama.cpp, or on a GPU"
        )


def load(job: Job) -> Any:
    """Return the engine of a job, vLLM's `LLM`. Raises ValueError, with the fix, for what this environment cannot measure."""
    for name, value in (ENVIRONMENT | OF_METHOD.get(job.method, {})).items():
        os.environ.setdefault(name, value)
    from vllm import LLM
    from vllm.platforms import current_platform

    sampled, has_plugin = any(request.temperature for request in job.requests), find_spec(PLUGIN.replace("-", "_")) is not None
    if job.method == "draft_model" and not has_plugin:
        raise ValueError(f"evaluation.engine: vllm: loads these drafts by the plugin {PLUGIN} alone; {INSTALL}")
    if job.method and current_platform.is_cpu() and sampled and not has_plugin:
        raise ValueError(
            "evaluation.temperatures: vLLM 0.32 samples wrongly beside a draft on a CPU: it never fills in the temperatures of "
            f"the drafted tokens; {PLUGIN} mends that: {INSTALL}; or measure temperature 0, or on a GPU"
        )
    if job.draft is not None and current_platform.is_cpu():
        check_on_cpu(job.draft)
    draft = {"method": job.method, "model": job.draft, "num_speculative_tokens": job.tokens}
    if sampled and job.draft is not None:
        draft["draft_sample_method"] = "probabilistic"  # else drafts are greedy, and fewer of them are kept
    if job.method == "ngram":
        draft |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}  # n-grams as in decode.lookup.LookupDrafter
    # vLLM crashes on a CPU if a seeded request's prompt is computed in parts.
    whole = {"max_num_batched_tokens": job.positions} if sampled and current_platform.is_cpu() else {}
    return LLM(
        model=job.model,
        skip_tokenizer_init=True,
        dtype=job.dtype,
        max_model_len=job.positions,
        max_num_seqs=1,
        enforce_eager=current_platform.is_cpu(),
        enable_prefix_caching=False,  # prompts share no work, so that each one's seconds are its own
        disable_log_stats=False,
        logprobs_mode="raw_logits",
        seed=0,
        speculative_config={name: value for name, value in draft.items() if value is not None} if job.method else None,
        **whole,
    )


def answer(llm: Any, request: Request, repeats: int) -> Answer:
    """Decode a request. Only the seconds of the further repeats are kept: greedy text and drafts are the same in each.

    Logits take time that a round of drafted tokens does not pay, so they and their text come from a decoding that is not timed.
    """
    timed = [_decode(llm, replace(request, best=0), repeat) for repeat in range(repeats)]
    told = _decode(llm, request, repeats) if request.best else timed[0]
    return Answer(id=request.id, **told | {"seconds": [each["seconds"] for each in timed]})


def _decode(llm: Any, request: Request, repeat: int) -> dict[str, Any]:
    """Return the fields of an Answer, for one repeat."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    settings = SamplingParams(
        temperature=request.temperature,
        seed=request.seed,
        max_tokens=request.max_tokens,
        stop_token_ids=request.stop,
        ignore_eos=True,  # `stop` holds all tokens that end a text
        logprobs=request.best or None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    before, engine = _counters(llm), llm.llm_engine
    engine.add_request(f"{request.id} {repeat}", {"prompt_token_ids": request.prompt}, settings)
    tokens: list[int] = []
    steps: list[int] = []
    best: list[Any] = []
    first = time.perf_counter()
    while engine.has_unfinished_requests():
        for output in engine.step():
            (new,) = output.outputs
            if not new.token_ids:
                continue
            if not tokens:
                first = time.perf_counter()
            tokens += new.token_ids
            steps.append(len(new.token_ids))
            for place in new.logprobs or []:  # vLLM adds the chosen token to the likeliest ones
                by_logit = sorted(((token, float(found.logprob)) for token, found in place.items()), key=lambda pair: -pair[1])
                best.append(by_logit[: request.best])
    ended = time.perf_counter()
    grown = [now - earlier for now, earlier in zip_longest(_counters(llm), before, fillvalue=0)]
    return {"tokens": tokens, "accepted": rounds_of(steps, *grown), "best": best, "seconds": ended - first}


def rounds_of(steps: list[int], counted: int = 0, *by_place: int) -> list[int]:
    """Return the drafted tokens kept in each round: a step's tokens minus the target's own; the prompt's step is no round.

    counted, by_place: growth of vLLM's counters. The end of the text may cut the last step, so the counter gives what its
    round kept. Raises RuntimeError if these rounds disagree with the counters by place: then one of them is misread.
    """
    kept = [size - 1 for size in steps[1:]]
    kept[-1:] = [counted - sum(kept[:-1])] if kept else []
    if list(by_place) != (found := [sum(count > place for count in kept) for place in range(len(by_place))]):
        raise RuntimeError(
            f"evaluation.engine: vllm: counted {list(by_place)} kept drafts by position, its steps give {found}: what this "
            "version counts is not known here; install the one of serve/vllm.txt, by `make .venv-serve/vllm/.stamp`"
        )
    return kept


def _counters(llm: Any) -> list[int]:
    """Return vLLM's counters of kept drafts: the total, then by place; empty if nothing was drafted so far."""
    found = {metric.name: metric for metric in llm.get_metrics()}
    return [found[ACCEPTED].value, *found[BY_PLACE].values] if ACCEPTED in found else []


if __name__ == "__main__":
    run(("vllm", "torch", "transformers"), load, answer)
