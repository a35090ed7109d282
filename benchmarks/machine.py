"""What a benchmark ran on, and where its numbers go."""

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from longspec.atomic_files import write_json
from longspec.distributed import processor_name

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
WORK = ROOT / ".cache/benchmarks"


def describe(libraries: tuple[str, ...]) -> dict[str, Any]:
    """The machine and the versions that decide the numbers; `load`: how many processes wanted a core at the start."""
    return {
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in libraries},
        "load": round(os.getloadavg()[0], 1),
    }


def write(name: str, numbers: dict[str, Any]) -> None:
    """One benchmark's numbers as benchmarks/results/{name}.json."""
    write_json(RESULTS / f"{name}.json", numbers)
    print(f"written: benchmarks/results/{name}.json")
