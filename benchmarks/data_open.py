"""Opening rows of a billion tokens and seeking to step 100,000: python benchmarks/data_open.py

The rows are made up (one record batch again and again) and removed afterwards; they take 5 GB of disk for that while. What is
measured is a fresh process, from its start to the tensors' source of that step: its time and the most memory it ever held.
"""

import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import machine
import numpy as np
import pyarrow as pa

from longspec.atomic_files import write_json
from longspec.data.pack import arrow_shards

SECONDS, MEGABYTES = 1.0, 200
TOKENS, LENGTH, ROWS_IN_BATCH = 10**9, 1024, 1024
STEP, GLOBAL_BATCH = 100_000, 8
FRESH = f"""
import json, time
began = time.perf_counter()
from pathlib import Path
import sys
from longspec.data.pack.arrow_shards import PackedRows, count_labels
from longspec.data.schedule import Schedule
imported = time.perf_counter()
rows = PackedRows(Path(sys.argv[1]))
opened = time.perf_counter()
numbers = Schedule([len(rows)], [1.0], {GLOBAL_BATCH}, 42).batch({STEP})
labels = count_labels(rows.find, numbers)
read = [rows[int(number)] for number in numbers]
done = time.perf_counter()
status = Path("/proc/self/status").read_text()
print(json.dumps({{"imports": imported - began, "open": opened - imported, "seek": done - opened,
    "megabytes": int(status.split("VmHWM:")[1].split()[0]) / 1024, "labels": labels, "rows": len(rows)}}))
"""


def write_rows(folder: Path) -> Path:
    """A packed folder of TOKENS tokens; its manifest."""
    draw = np.random.default_rng(0)
    ids = draw.integers(0, 150_000, ROWS_IN_BATCH * LENGTH).astype(np.int32)
    mask = np.ones(len(ids), np.uint8)
    counts, starts = np.full(ROWS_IN_BATCH, 3), np.tile([0, 300, 700], ROWS_IN_BATCH)
    schema = arrow_shards.row_schema(LENGTH)
    columns = [
        pa.FixedSizeListArray.from_arrays(pa.array(ids), LENGTH),
        pa.FixedSizeListArray.from_arrays(pa.array(mask), LENGTH),
        arrow_shards.lists(counts, pa.array(starts, pa.int32())),
        pa.array(np.full(ROWS_IN_BATCH, LENGTH), pa.int32()),
        arrow_shards.lists(counts, pa.array(starts, pa.int64())),
        pa.array(np.full(ROWS_IN_BATCH, LENGTH - 3), pa.int32()),
        arrow_shards.lists(counts, pa.array(starts, pa.int64())),
    ]
    batch = pa.record_batch(columns, schema=schema)
    batches = -(-TOKENS // (ROWS_IN_BATCH * LENGTH))
    folder.mkdir(parents=True)
    with pa.ipc.new_file(str(folder / arrow_shards.ROWS), schema) as writer:
        for _ in range(batches):
            writer.write_batch(batch)
    files = {arrow_shards.ROWS: {"bytes": (folder / arrow_shards.ROWS).stat().st_size}}
    write_json(folder / "manifest.json", {"sequence_length": LENGTH, "rows": batches * ROWS_IN_BATCH, "files": files})
    return folder / "manifest.json"


def fresh(manifest: Path) -> dict[str, float]:
    """One fresh process; `total` counts its start and its end too."""
    began = time.perf_counter()
    ran = subprocess.run([sys.executable, "-c", FRESH, str(manifest)], capture_output=True, text=True, check=True)
    return {"total": time.perf_counter() - began, **json.loads(ran.stdout)}


def main() -> None:
    """Five fresh processes."""
    folder = machine.WORK / "open"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        manifest = write_rows(folder)
        runs = [fresh(manifest) for _ in range(5)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    total, most = statistics.median(run["total"] for run in runs), max(run["megabytes"] for run in runs)
    numbers: dict[str, Any] = {
        "machine": machine.describe(("pyarrow", "numpy")),
        "bars": {"seconds": SECONDS, "megabytes": MEGABYTES},
        "tokens": int(runs[0]["rows"]) * LENGTH,
        "seconds": total,
        "megabytes": most,
        "runs": runs,
        "holds": total < SECONDS and most < MEGABYTES,
    }
    print(f"{total:.2f} s, {most:.0f} MB")
    machine.write("data_open", numbers)


if __name__ == "__main__":
    main()
