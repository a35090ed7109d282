"""Which engine `longspec serve` takes for a draft, and what to type for an engine that it does not start itself."""

import os
from collections.abc import Mapping
from pathlib import Path
from shlex import join, quote
from typing import Any

from longspec import methods
from longspec.config.names import is_gguf
from longspec.engines import ENGINES, LLAMA_CPP, OPENVINO, VLLM, Engine

SERVERS = (VLLM, LLAMA_CPP)  # engines with a server, the first choice first


def choose(method: str, given: str | None, pythons: Mapping[str, str], run: str, draft: Path) -> Engine:
    """Return the engine that serves drafts of a method on this machine.

    given: --engine; pythons: of each engine the interpreter of its environment. By itself it takes the first server that loads
    the method's drafts and whose environment is there; without any, the first that loads them, which then says how it is
    installed. Raises ValueError, with what to type, for an engine that does not load the drafts or has no server.
    """
    loading = [name for name in SERVERS if name in methods.settings_of(method).SERVED]
    if not loading:
        raise ValueError(f"{draft}: no engine loads {method} drafts; see it at work: longspec try {draft}")
    others = " or ".join(join(["longspec", "serve", run, "--engine", name]) for name in loading)
    if given == OPENVINO:
        raise ValueError(
            f"--engine {given}: {ENGINES[given].title} is a library without a server; measure the draft in it: "
            f"snakemake serves --config {quote(f'runs=[{run}]')}; to serve: {others}"
        )
    if given is not None and given not in loading:
        raise ValueError(f"--engine {given}: {ENGINES[given].title} loads no {method} drafts; type {others}")
    there = [name for name in loading if os.access(pythons[name], os.X_OK)]
    return ENGINES[given or [*there, *loading][0]]


def llama_cpp_commands(draft: Path, config: dict[str, Any], recipe: Any, tokens: int) -> list[str]:
    """Return the commands that write a draft and its target as GGUF files and start a llama.cpp of the user's with them.

    config: the draft's config.json; tokens: drafted ones of a round. A target that came from a GGUF file is served from it.
    Where llama.cpp shows a draft all of a text in spite of its sliding window, texts are kept within the window.
    """
    beside, source = draft.parent, str(config.get("target_source") or "")
    target = Path(source) if is_gguf(source) and Path(source).is_file() else beside / "target.gguf"
    served = methods.settings_of(recipe.method.name).SERVED[LLAMA_CPP]
    window = None if served.windows else getattr(recipe.method, "sliding_window", None)
    export = ["longspec", "export", str(draft), "--layout", "gguf", "--out", str(beside / "draft.gguf")]
    export += [] if str(target) == source else ["--target", str(target)]
    export += [] if window is None else ["--context", str(window)]
    serve = ["llama-server", "-m", str(target), "--spec-type", served.kind, "--spec-draft-model", str(beside / "draft.gguf")]
    serve += ["--spec-draft-n-max", str(tokens)]
    serve += [] if window is None else ["--ctx-size", str(window), "--parallel", "1"]
    return [join(export), join(serve)]
