"""Decode one request at a time with OpenVINO GenAI, and record its steps' sizes. Only this module uses OpenVINO GenAI.

    python -m longspec.measure.engines.openvino JOB        in an environment that has openvino-genai and optimum-intel

A separate process (openvino_ir.py) converts target and draft to OpenVINO's format, so that no torch is in memory when the
pipeline starts. Files that are in this format already are loaded as they are.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspec.measure.engines.openvino_ir import MODEL, is_converted
from longspec.measure.engines.protocol import Answer, Job, Request, cut, run, within

INSTALL = "install the one of serve/openvino.txt, by `make .venv-serve/openvino/.stamp`"
CONVERTER = "longspec.measure.engines.openvino_ir"
THREADS = "OMP_NUM_THREADS"
# Precision of OpenVINO's computation and of its keys and values, which it quantizes to 8 bits by default.
PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
LOOKUP, NGRAM = "prompt_lookup", 3  # n-grams as in decode.lookup.LookupDrafter
CHUNK = 256  # tokens of one forward, whose logits are all in memory


@dataclass(frozen=True)
class Engine:
    """Hold a pipeline. tokens: drafted in each round, 0 without draft; target: the compiled target, for logits."""

    pipeline: Any
    kind: str | None
    tokens: int
    target: Any


def load(job: Job) -> Engine:
    """Start the pipeline of a job. Raises ValueError if a model cannot be converted or loaded."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    target, draft = _converted(job)
    try:
        return _started(job, target, draft)
    except RuntimeError as error:
        raise ValueError(f"evaluation.engine: openvino: does not load {job.files}: {_last_line(error)}") from None


def _started(job: Job, target: Path, draft: Path | None) -> Engine:
    import openvino
    import openvino_genai

    precision = PRECISIONS[job.dtype]
    properties = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": int(os.environ.get(THREADS) or 1)}
    cached = properties | {"KV_CACHE_PRECISION": precision}
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # prompts share no work, so that each one's seconds are its own
    scheduler.max_num_batched_tokens = max(job.positions, CHUNK)  # a prompt is one step
    kinds: dict[str, Any] = {"scheduler_config": scheduler}
    if draft is not None:
        kinds["draft_model"] = openvino_genai.draft_model(str(draft), "CPU", **cached)
    elif job.method == LOOKUP:
        kinds["prompt_lookup"] = True
    pipeline = openvino_genai.LLMPipeline(str(target), "CPU", **kinds, **cached)
    judged = any(request.best for request in job.requests)
    alone = openvino.Core().compile_model(target / MODEL, "CPU", properties).create_infer_request() if judged else None
    return Engine(pipeline, job.method, job.tokens if job.method else 0, alone)


def _last_line(error: Exception) -> str:
    """Return the last line of OpenVINO's error; the lines before name its own source files."""
    return str(error).strip().splitlines()[-1]


def _converted(job: Job) -> tuple[Path, Path | None]:
    """Return the folders of target and draft in OpenVINO's format, converted into job.scratch if needed; None: no draft."""
    target, draft, out = Path(job.model), None if job.draft is None else Path(job.draft), Path(job.scratch)
    own_target, own_draft = is_converted(target), draft is not None and is_converted(draft)
    if own_target and draft is not None and not own_draft:
        raise ValueError(f"{target}: is in OpenVINO's format, {draft} is not; give both in this format, or neither")
    if not own_target:
        more = [] if draft is None or own_draft else ["--draft", str(draft)]
        command, last = [sys.executable, "-m", CONVERTER, str(target), str(out), *more], ""
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            for line in process.stderr or ():
                print(line, end="", file=sys.stderr, flush=True)
                last = line.strip() or last
        if process.returncode < 0:
            sys.exit(f"error: the process that converts {target} was killed by signal {-process.returncode}")
        if process.returncode:
            raise ValueError(f"evaluation.engine: openvino: {target} was not converted: {last.removeprefix('error: ')}")
    return (target if own_target else out / "target"), (draft if draft is None or own_draft else out / "draft")


def answer(engine: Engine, request: Request, repeats: int) -> Answer:
    """Decode a request greedily. Only the seconds of the further repeats are kept.

    The pipeline is asked for one round more than needed, since its last rounds draft no further than the text may go. Raises
    ValueError if OpenVINO refuses the request.
    """
    import numpy
    import openvino

    prompt = openvino.Tensor(numpy.array([request.prompt], dtype=numpy.int64))
    settings = _settings(engine, request)
    try:
        found, *others = [engine.pipeline.generate(prompt, settings) for _ in range(repeats)]
    except RuntimeError as error:
        asked = f"{len(request.prompt)} tokens of prompt, {request.max_tokens} of text"
        raise ValueError(f"evaluation.engine: openvino: refuses {request.id} ({asked}): {_last_line(error)}") from None
    tokens = cut(list(map(int, found.tokens[0])), request)
    times = [each.perf_metrics.raw_metrics.m_new_token_times for each in (found, *others)]  # milliseconds
    kept = rounds_within(list(found.perf_metrics.raw_metrics.m_batch_sizes), len(tokens))
    return Answer(
        id=request.id,
        tokens=tokens,
        accepted=kept,
        seconds=[float(each[len(kept)] - each[0]) / 1000 for each in times],
        best=list(_best(engine.target, request, tokens)) if request.best else [],
    )


def rounds_within(sizes: list[int], length: int) -> list[int]:
    """Return the drafts kept in each round of a text of this length. sizes: tokens of each step, the prompt's step first.

    Raises ValueError if the steps do not belong to this text.
    """
    if sum(sizes) < length or sizes[0] != 1:
        raise ValueError(f"OpenVINO names steps of {sizes} tokens for a text of {length}; {INSTALL}")
    return within([size - 1 for size in sizes[1:]], length)


def _settings(engine: Engine, request: Request) -> Any:
    import openvino_genai

    settings = openvino_genai.GenerationConfig()
    settings.max_new_tokens = request.max_tokens + engine.tokens
    settings.do_sample = False
    settings.ignore_eos = not request.stop
    # Without a tokenizer it knows no end-of-text token, but requires one.
    settings.eos_token_id = request.stop[0] if request.stop else 0
    settings.stop_token_ids = set(request.stop)
    if engine.tokens:
        settings.num_assistant_tokens = engine.tokens
    if engine.kind == LOOKUP:
        settings.max_ngram_size = NGRAM
    return settings


def _best(target: Any, request: Request, tokens: list[int]) -> Iterator[list[tuple[int, float]]]:
    """Yield the likeliest tokens at each place of a text with their logits, from the target alone: the pipeline gives none."""
    import numpy

    ids = [*request.prompt, *tokens[:-1]]
    target.reset_state()
    for start in range(0, len(ids), CHUNK):
        part = ids[start : start + CHUNK]
        end = start + len(part)
        inputs = {
            "input_ids": numpy.array([part], dtype=numpy.int64),
            "attention_mask": numpy.ones((1, end), dtype=numpy.int64),
            "position_ids": numpy.arange(start, end, dtype=numpy.int64)[None],
            "beam_idx": numpy.zeros(1, dtype=numpy.int32),
        }
        logits_SV = target.infer(inputs)["logits"][0]
        for logits_V in logits_SV[max(0, len(request.prompt) - 1 - start) :]:
            likeliest = numpy.argsort(-logits_V, kind="stable")[: request.best]
            yield [(int(token), float(logits_V[token])) for token in likeliest]


if __name__ == "__main__":
    run(("openvino_genai", "openvino", "optimum", "transformers", "torch"), load, answer)
