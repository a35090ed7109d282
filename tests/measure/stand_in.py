"""An interpreter that answers as longspec.measure.engines do, without their engines: the prompt alone decides a text.

What it is asked, and after how many answers it is to end itself, stands in the folder that STAND_IN names.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from longspec.measure.engines.protocol import REFUSED, Answer, read_job

VERSIONS = {"vllm": "0.32.0", "torch": "2.13.0+cpu", "transformers": "5.19.0"}


def text_of(prompt: list[int], count: int) -> list[int]:
    """A text that no two prompts share."""
    return [3 + (sum(prompt) + 7 * place) % 250 for place in range(count)]


def main() -> None:
    folder = Path(os.environ["STAND_IN"])
    assert sys.argv[1] == "-m"
    assert sys.argv[2].removeprefix("longspec.measure.engines.") in ("vllm", "llama_cpp", "openvino")
    if sys.argv[3] == "--versions":
        print(json.dumps(VERSIONS))
        return
    job = read_job(Path(sys.argv[3]))
    if (folder / "refuses").exists():
        print(json.dumps({REFUSED: (folder / "refuses").read_text()}), flush=True)
        sys.exit(1)
    with (folder / "scratch").open("a") as scratch:
        scratch.write(f"{job.scratch} {len(list(Path(job.scratch).glob('made')))}\n")
    (Path(job.scratch) / "made").touch()
    if Path(job.model).is_file():
        (folder / "model.json").write_text(json.dumps([job.model, Path(job.model).read_bytes()[:4].decode()]))
    left = json.loads((folder / "ends_after").read_text()) if (folder / "ends_after").exists() else 10**9
    with (folder / "asked.jsonl").open("a") as asked:
        for request in job.requests:
            left -= 1
            if left < 0:
                (folder / "ends_after").unlink()
                print('{"id": "torn', end="", flush=True)
                sys.exit(7)
            asked.write(json.dumps([job.method, job.draft, job.tokens, job.positions, request.id]) + "\n")
            asked.flush()
            tokens = text_of(request.prompt, request.max_tokens)
            best = [[[token, 2.0], [1, 0.5]] for token in tokens] if request.best else []
            # Rounds of one kept draft each: as many as the text needs, the last one may have kept one beyond it.
            rounds = [] if job.method is None else [1] * (len(tokens) // 2)
            answer = Answer(request.id, tokens, rounds, [0.5] * job.repeats, best)
            print(json.dumps(asdict(answer)), flush=True)


if __name__ == "__main__":
    main()
