"""Copy what `make gpu` needs beside torch and transformers into .gpu/<Python>/: make gpu-packages VENV=.venv-3.12

Run it in an environment of the Python that the GPU machine has, of the same processor. Left out is what THERE names, with all
that it needs: such a machine is taken to have it. The folder travels with the tree; .gpu/ is ignored by git.
"""

import re
import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.gpu_parts import PACKAGES

WANTED = ("longspec[train]", "jsonschema")
THERE = ("torch", "transformers", "accelerate", "safetensors", "numpy", "pyarrow", "scipy", "pandas", "matplotlib")
THERE += ("pytest", "hypothesis", "jinja2", "pyyaml", "rich", "tqdm", "requests", "httpx", "psutil", "ninja", "einops")
THERE += ("msgpack", "xxhash", "tabulate", "wrapt", "nvidia-ml-py", "py-cpuinfo", "setuptools", "huggingface-hub")
OURS = ("pydantic",)  # though some of these need it in their newest versions
UNUSED = ("openai", "jiter", "docutils")  # by any part
NO_FOLDERS = {"..", "tests", "testing", "solverdir"}
LARGEST_MB = 50  # of 60, of which the tree takes up to 10


def closure(names: tuple[str, ...]) -> set[str]:
    """Return the packages of this environment that these need, themselves among them."""
    found: set[str] = set()
    waiting = [Requirement(name) for name in names]
    while waiting:
        wanted = waiting.pop()
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:  # of another system, or an extra
            continue
        if name in found and not wanted.extras:
            continue
        found.add(name)
        for need in map(Requirement, needs):
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in wanted.extras or {""}):
                waiting.append(need)
    return found


def main() -> None:
    """Copy the packages; ends with an error when they have grown too large to travel."""
    shutil.rmtree(PACKAGES, ignore_errors=True)
    names = sorted((closure(WANTED) - closure(THERE) - {"longspec", *UNUSED}) | closure(OURS))
    for name in names:
        for file in distribution(name).files or []:
            if not NO_FOLDERS.intersection(file.parts) and file.suffix != ".pyc":
                (PACKAGES / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(file.locate()), PACKAGES / file)
    megabytes = sum(path.stat().st_size for path in PACKAGES.rglob("*") if path.is_file()) / 1e6
    print(f"{PACKAGES}: {megabytes:.0f} MB of {', '.join(names)}")
    if megabytes > LARGEST_MB:
        sys.exit(f"more than {LARGEST_MB} MB: with the tree it would not travel")


if __name__ == "__main__":
    main()
