"""Decodes by a GLIDE draft in vLLM's own environment, and keeps what the draft says in every round (test_vllm_glide.py).

It is called with the file of a Job, in JSON, and with the file to write, by torch.save: for each pass what `main` lists.
"""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
ENVIRONMENT |= {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
COUNTERS = {"num_accepted_tokens": "vllm:spec_decode_num_accepted_tokens", "preemptions": "vllm:num_preemptions"}


@dataclass
class Pass:
    """A call of `generate`. settings: of its SamplingParams; fault: set wrong, as of `set_wrong`; keep: rounds to keep."""

    prompts: list[list[int]]
    settings: dict[str, Any]
    fault: str = ""
    keep: int = 10**9


@dataclass
class Job:
    """A model, its draft's folder, and what is decoded in turn. engine: further arguments of `LLM`."""

    model: str
    draft: str | None
    tokens: int
    passes: list[Pass]
    engine: dict[str, Any] = field(default_factory=dict)
    sample_method: str = "greedy"


class Recorder:
    """Keeps of each round: request, position of the token that the target has just sampled, drafted tokens, their logits."""

    def __init__(self) -> None:
        from longspec_vllm import glide
        from vllm.v1.spec_decode.draft_model import DraftModelProposer

        self.rounds: list[dict[str, Any]] = []
        self.keep, self.logits, self.positions = 0, [], None
        self.runner: Any = None
        first_pass, propose = DraftModelProposer.set_inputs_first_pass, DraftModelProposer.propose
        compute = glide.GlideForCausalLM.compute_logits

        def set_inputs(proposer: Any, *args: Any, **kwargs: Any) -> Any:
            found = first_pass(proposer, *args, **kwargs)
            self.positions = proposer.positions[found[1]].tolist()
            return found

        def recorded(model: Any, hidden: Any, *args: Any) -> Any:
            self.logits.append(compute(model, hidden, *args))
            return self.logits[-1].clone()

        def proposed(proposer: Any, *args: Any, **kwargs: Any) -> Any:
            self.logits = []
            drafts = propose(proposer, *args, **kwargs)
            requests = list(self.runner.input_batch.req_ids)
            for row, request in enumerate(requests[: len(drafts)]):
                if len(self.rounds) < self.keep:
                    logits = [step[row].float().clone() for step in self.logits]
                    self.rounds.append({"request": request, "position": self.positions[row], "logits": logits})
                    self.rounds[-1]["drafts"] = drafts[row].tolist()
            return drafts

        DraftModelProposer.set_inputs_first_pass = set_inputs
        DraftModelProposer.propose = proposed
        glide.GlideForCausalLM.compute_logits = recorded


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def shares_scales(llm: Any) -> bool:
    """Whether the cross attention, and it alone, reads an fp8 cache by the factors of the layer that has written it."""
    model = runner_of(llm).drafter.model
    (of_target,) = model.cross_attn.of_target
    own, cross = model.self_attn.attn, model.cross_attn.attn
    return cross._k_scale is of_target._k_scale is not own._k_scale and cross._v_scale is of_target._v_scale


def set_wrong(llm: Any, fault: str, own_expand: Any) -> Any:
    """Set one thing wrong in a running engine; returns how to set it right again."""
    if not fault:
        return lambda: None
    from longspec_vllm import clipped
    from vllm.v1.sample import rejection_sampler

    if fault == "vLLM's own sampling":
        mended = rejection_sampler.expand_batch_to_tokens
        rejection_sampler.expand_batch_to_tokens = own_expand
        return lambda: setattr(rejection_sampler, "expand_batch_to_tokens", mended)
    runner = runner_of(llm)
    model = runner.drafter.model
    if fault in ("clip+1", "clip-1"):
        right = clipped.clipped
        more = int(fault[4:])
        clipped.clipped = lambda common, hidden: right(common, hidden + more)
        return lambda: setattr(clipped, "clipped", right)
    if fault in ("window+1", "window-1"):
        impl = model.self_attn.attn.impl
        right_window = impl.sliding_window
        impl.sliding_window = right_window + int(fault[6:])
        builder = next(group for group in runner.drafter.draft_attn_groups if "Windowed" in group.backend.__name__)
        builder.get_metadata_builder().window_size = -1
        return lambda: setattr(impl, "sliding_window", right_window)
    raise ValueError(fault)


def main() -> None:
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    import torch
    from vllm import LLM, SamplingParams
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens as own_expand  # before the plugin mends it

    content = json.loads(Path(sys.argv[1]).read_text())
    job = Job(**content | {"passes": [Pass(**each) for each in content["passes"]]})
    recorder = Recorder() if job.draft else None
    speculative = {"method": "draft_model", "model": job.draft, "num_speculative_tokens": job.tokens}
    llm = LLM(
        model=job.model,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        seed=0,
        logprobs_mode="raw_logits",
        speculative_config=speculative | {"draft_sample_method": job.sample_method} if job.draft else None,
        **{"dtype": "float32", "enforce_eager": True} | job.engine,
    )
    found = []
    for each in job.passes:
        if recorder:
            recorder.runner = runner_of(llm)
            recorder.rounds, recorder.keep = [], each.keep
        set_right = set_wrong(llm, each.fault, own_expand)
        settings = SamplingParams(detokenize=False, **{"ignore_eos": True} | each.settings)
        before = counters(llm)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in each.prompts], settings, use_tqdm=False)
        set_right()
        grown = {name: value - before[name] for name, value in counters(llm).items()}
        places = [place for output in outputs for place in output.outputs[0].logprobs or []]
        best = [sorted((token.logprob for token in place.values()), reverse=True) for place in places]
        found.append(
            {
                "texts": [list(output.outputs[0].token_ids) for output in outputs],
                "requests": [output.request_id for output in outputs],
                "rounds": recorder.rounds if recorder else [],
                "counters": grown,
                "scales": bool(recorder) and shares_scales(llm),
                "margins": [logits[0] - logits[1] for logits in best],
            }
        )
    torch.save(found, sys.argv[2])


def counters(llm: Any) -> dict[str, int]:
    """vLLM's counters of accepted tokens, of which there are none without a draft, and of preemptions."""
    found = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in COUNTERS.values()}
    return {name: found.get(of_vllm, 0) for name, of_vllm in COUNTERS.items()}


if __name__ == "__main__":
    main()
