"""Decode the requests of a job with vLLM, in vLLM's own environment; prints a line of JSON for each answer."""

import argparse
import json
import os
import sys
from importlib import metadata
from pathlib import Path

from longspec.measure.engines.protocol import read_job


def versions() -> dict[str, str]:
    """The versions that decide what vLLM computes. Raises ValueError where it is not installed."""
    names = metadata.packages_distributions()
    if "vllm" not in names:
        raise ValueError(f"{sys.executable}: vLLM is not installed here")
    return {name: metadata.version(names[name][0]) for name in ("vllm", "torch", "transformers")}


def serve(path: Path, out: int) -> None:
    """A line of answer for each request, written as soon as it is done."""
    from longspec.measure.engines import vllm

    job = read_job(path)
    llm = vllm.load(job)
    vllm.answer(llm, job.requests[0], 1)  # its first times are those of a cold start
    with os.fdopen(out, "w", encoding="utf-8") as answers:
        for request in job.requests:
            answers.write(vllm.answer(llm, request, job.repeats).encode() + "\n")
            answers.flush()


def main() -> None:
    """Read the command line. All that vLLM prints goes to the standard error: the standard output is for answers alone."""
    parser = argparse.ArgumentParser(prog="python -m longspec.measure.engines", description=__doc__)
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--versions", action="store_true", help="print the versions of vLLM and of what it stands on")
    asked.add_argument("job", nargs="?", type=Path, help="a job's file, as longspec.measure evaluate --engine vllm writes it")
    options = parser.parse_args()
    try:
        if options.versions:
            print(json.dumps(versions()))
            return
        out = os.dup(1)
        os.dup2(2, 1)
        serve(options.job, out)
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
