"""Engines that decode: their names, what they load and what they cannot do. No torch: runs are planned with it.

Each but our own is a module in measure/engines, run by the Python of an environment of its own, `.venv-serve/<name>`. How an
engine loads the drafts of a method, the method's settings say (SERVED).
"""

from dataclasses import dataclass

OURS, VLLM, LLAMA_CPP, OPENVINO = "longspec", "vllm", "llama.cpp", "openvino"


@dataclass(frozen=True)
class Engine:
    """An engine of another environment.

    name: of evaluation.engine; title: its own name; lookup: its name of prompt lookup; samples: whether it samples;
    target_layout: the layout it loads targets in (target/layouts.py), None for the folder itself; targets: families of targets
    beside which it drafts, None for all that this project knows.
    """

    name: str
    title: str
    lookup: str
    target_layout: str | None = None
    samples: bool = False
    targets: tuple[str, ...] | None = None

    @property
    def python(self) -> str:
        """Return the interpreter of its environment."""
        return f".venv-serve/{self.name}/bin/python"

    @property
    def install(self) -> str:
        """Return the command that makes its environment."""
        return f"`make .venv-serve/{self.name}/.stamp`"

    def check_beside(self, family: str) -> None:
        """Raise ValueError for a family of targets beside which it does not draft."""
        if self.targets is not None and family not in self.targets:
            raise ValueError(
                f"{self.title} drafts beside targets of {', '.join(self.targets)} alone, and this one is of {family}"
            )


@dataclass(frozen=True)
class Served:
    """How an engine loads a method's drafts.

    kind: its own name of such drafts; layout: None for the draft folder itself; windows: whether it computes their windows.
    """

    kind: str
    layout: str | None = None
    windows: bool = True


ENGINES = {
    VLLM: Engine(VLLM, "vLLM", lookup="ngram", samples=True),
    LLAMA_CPP: Engine(
        LLAMA_CPP, "llama.cpp", lookup="ngram-simple", target_layout="gguf", targets=("llama", "mistral", "qwen2")
    ),
    # OpenVINO GenAI knows a layer's output by its last sum, of a feed-forward part without norm or experts.
    OPENVINO: Engine(OPENVINO, "OpenVINO", lookup="prompt_lookup", targets=("llama", "mistral", "phi3", "qwen2", "qwen3")),
}
