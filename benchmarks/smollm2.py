"""What `make smollm2` took and brought, in the clone in which it has ended: python benchmarks/smollm2.py

Seconds of the whole, as Snakemake tells them at the end of its log; acceptance length, speed
and differences from plain decoding by the report. Bars: 150 minutes on two cores with instructions for bfloat16; 2.7 tokens a
round; 1.6 times plain decoding's speed.
"""

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import machine

RUN, VARIANT, STAGE = "smollm2-eagle3", "ttt", "answers"
MOST_MINUTES, LEAST_LENGTH, LEAST_SPEED = 150, 2.7, 1.6
ELAPSED = re.compile(r"^Elapsed time: (\d+):(\d+):(\d+)", re.MULTILINE)


def seconds_of_the_whole() -> float:
    """Over the calls of Snakemake that made this run. One that was killed tells no time, and ends this with an error."""
    texts = [path.read_text() for path in Path(".snakemake/log").glob("*.log")]
    found = [ELAPSED.search(text) for text in texts if f"results/{RUN}/" in text]
    times = [timedelta(hours=int(each[1]), minutes=int(each[2]), seconds=int(each[3])) for each in found if each]
    assert 0 < len(times) == len(found), "a call of this run in .snakemake/log tells no time, or there is none"
    return sum(times, timedelta()).total_seconds()


def main() -> None:
    """Collect, hold against the bars, write."""
    report: dict[str, Any] = json.loads(Path(f"results/{RUN}/report.json").read_text())
    length, speed = report["overall"][VARIANT], report["speed"][VARIANT]
    whole = seconds_of_the_whole()
    holds = {
        "minutes": whole <= 60 * MOST_MINUTES,
        "acceptance": length[STAGE]["mean"] >= LEAST_LENGTH,
        "speed": speed[STAGE]["speed_up"]["mean"] >= LEAST_SPEED,
    }
    ran_on = machine.describe(("torch", "transformers"))
    del ran_on["load"]  # of now
    numbers = {
        "machine": ran_on,
        "seconds": whole,
        "acceptance_length": length,
        "speed_up": {drafter: of["speed_up"] for drafter, of in speed.items()},
        "lossless": report["lossless"][VARIANT],
        "holds": holds,
    }
    machine.write("smollm2", numbers)
    print(json.dumps({"seconds": whole, "holds": holds}))


if __name__ == "__main__":
    main()
