"""What the makers of tests/golden/*/speculators.safetensors share: numbers that the package `speculators` computes.

    python -m venv /tmp/speculators
    /tmp/speculators/bin/pip install torch==2.13.0 transformers==5.19.0 speculators==0.9.0
    /tmp/speculators/bin/python -m tests.golden.eagle3.make
    /tmp/speculators/bin/python -m tests.golden.dflash.make

They run in that environment, whose transformers is older than this project's, and import nothing of longspec. torch's CPU build
is enough, and torchvision and torchaudio, which speculators asks for, may be missing. A file holds a tiny target and two drafts
of random weights, and for two texts of each draft what goes in and what comes out, in float32 with the attention `eager`.

Shapes: S tokens of a text, H hidden width, T target's vocabulary, V draft vocabulary.
"""

import json
import tempfile
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

TARGET = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 0,  # as each maker says
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def randomize(module: nn.Module) -> None:
    """Weights at which every part matters; those without a gradient stay."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            nn.init.uniform_(parameter, 0.5, 1.5) if parameter.ndim == 1 else nn.init.normal_(parameter, std=0.3)


def vocabulary_of(size: int) -> dict[str, Any]:
    """The arguments that give a draft so many of the target's tokens."""
    t2d = d2t = None
    if size < TARGET["vocab_size"]:
        ids_V = torch.randperm(TARGET["vocab_size"])[:size].sort().values
        t2d, d2t = torch.zeros(TARGET["vocab_size"], dtype=torch.bool), ids_V - torch.arange(size)
        t2d[ids_V] = True
    return {"t2d": t2d, "d2t": d2t, "draft_vocab_size": size}


@torch.no_grad()
def target_states(target: LlamaForCausalLM, documents: list[Tensor], layers: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs of the layers that are read [S, 3 H], the final norm's input [S, H], and logits [S, T], each document alone."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for ids_S in documents:
        before_norm: list[Tensor] = []
        with target.model.norm.register_forward_pre_hook(lambda _, inputs, kept=before_norm: kept.append(inputs[0][0])):
            out = target(ids_S[None], output_hidden_states=True)
        taps = torch.cat([out.hidden_states[layer][0] for layer in layers], dim=-1)
        found.append((taps, before_norm[0], out.logits[0]))
    taps, last, logits = (torch.cat(each) for each in zip(*found, strict=True))
    return taps, last, logits


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of every weight that is trained, by its name."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {f"gradient/{name}": parameter.grad.clone() for name, parameter in trained.items()}


def write(
    file: Path,
    layers: int,
    drafts: dict[str, tuple[Any, ...]],
    build: Callable[..., Any],
    texts: Callable[..., Iterable[dict[str, Tensor]]],
    about: dict[str, Any],
) -> None:
    """Write the file. layers: of the target; build: a draft beside its folder; texts: of both each text's tensors."""
    torch.manual_seed(0)
    config = TARGET | {"num_hidden_layers": layers}
    target = LlamaForCausalLM(LlamaConfig(**config)).eval()
    randomize(target)
    tensors = {f"target/{name}": tensor for name, tensor in target.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        target.save_pretrained(folder)
        for name, draft in drafts.items():
            model = build(folder, *draft)
            weights = {key: value.detach() for key, value in model.named_parameters() if value.requires_grad}
            if model.d2t is not None:
                weights["d2t"] = model.d2t
            tensors |= {f"{name}/weights/{key}": value for key, value in weights.items()}
            for number, found in enumerate(texts(model, target)):
                tensors |= {f"{name}/{number}/{key}": value for key, value in found.items()}
    versions = {package: version(package) for package in ("speculators", "transformers", "torch")}
    content = json.dumps({"target": config, **about, "versions": versions})
    # One entry alone: several would be written in an order that changes from run to run.
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"about": content})
    print(f"{file}: {file.stat().st_size} bytes")
