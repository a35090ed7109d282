"""Engines that decode: their names, what they load and what they cannot do. No torch: runs are planned with it.

Each engine but our own is a module in measure/engines, run by the Python of its own environment, `.venv-serve/<name>`. A
method's settings say how an engine loads its drafts (SERVED).
"""

from dataclasses import dataclass

OURS, VLLM, LLAMA_CPP, OPENVINO = "longspec", "vllm", "llama.cpp", "openvino"


@dataclass(frozen=True)
class Engine:
    """Describe an engine of another environment.

    name: its value of evaluation.engine; title: its own name; lookup: its name for prompt lookup; samples: whether it samples;
    target_layout: the layout it loads targets in (target/layouts.py), None: the target's folder itself; targets: the target
    families it drafts for, None: all that this project knows.
    """

    name: str
    title: str
    lookup: str
    target_layout: str | None = None
    samples: bool = False
    targets: tuple[str, ...] | None = None

    @property
    def python(self) -> str:
        """Return the Python interpreter of its environment."""
        return f".venv-serve/{self.name}/bin/python"

    @property
    def install(self) -> str:
        """Return the command that makes its environment."""
        return f"`make .venv-serve/{self.name}/.stamp`"

    def check_beside(self, family: str) -> None:
        """Raise ValueError if it does not draft for targets of this family."""
        if self.targets is not None and family not in self.targets:
            raise ValueError(f"{self.title} drafts beside targets of {', '.join(self.targets)} alone, not of {family}")


@dataclass(frozen=True)
class Served:
    """Say how an engine loads a method's drafts.

    kind: its name for such drafts; layout: the layout it loads, None: the draft folder; windows: whether it computes windows.
    """

    kind: str
    layout: str | None = None
    windows: bool = True


ENGINES = {
    VLLM: Engine(VLLM, "vLLM", lookup="ngram", samples=True),
    LLAMA_CPP: Engine(
        LLAMA_CPP, "llama.cpp", lookup="ngram-simple", target_layout="gguf", targets=("llama", "mistral", "qwen2")
    ),
    # OpenVINO GenAI finds a layer's output by its last sum, which must be of a feed-forward part without norm or experts.
    OPENVINO: Engine(OPENVINO, "OpenVINO", lookup="prompt_lookup", targets=("llama", "mistral", "phi3", "qwen2", "qwen3")),
}
