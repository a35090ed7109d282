"""The target of a GGUF file, as a transformers folder: the `dequantize` verb.

Weights are written in float32, 4 bytes each: a scale in float16 times a small integer is exact there, and rounded in bfloat16.
All of them are held at once.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)

from longspec.atomic_files import new_folder, read_json, sha256_file
from longspec.models.weight_files import telling_damage
from longspec.target.fetch import check_folder, write_manifests
from longspec.target.gguf_file import read_config, read_metadata, save_tokenizer

SHARD_BYTES = 2 * 2**30


def make(source: str, sha256: str | None, fetched: Path | None, out_target: Path, out_tokenizer: Path) -> None:
    """Write a target's folder and both manifests, of a GGUF file: `source`, or the one in the manifest `fetched`.

    Raises ValueError for another hash than `sha256`, and for a file that is damaged or of a model that is not supported.
    """
    for out in (out_target, out_tokenizer):
        out.unlink(missing_ok=True)
    path = (Path(source).expanduser() if fetched is None else Path(read_json(fetched)["path"])).absolute()
    if not path.is_file():
        raise ValueError(f"recipe.model.source: {source}: {path}: no such file; place it there, or correct the path")
    found = sha256_file(path)
    if sha256 is not None and found != sha256:
        raise ValueError(
            f"recipe.model.sha256: is {sha256}, that of {path} is {found}; copy the file again, or correct the key"
        )
    folder = out_target.parent / "target"
    with new_folder(folder) as beside:
        convert(path, beside)
        check_folder(beside)
    write_manifests(folder, source, out_target, out_tokenizer, gguf={"bytes": path.stat().st_size, "sha256": found})


def convert(path: Path, folder: Path) -> None:
    """Write configuration, tokenizer and weights of a GGUF file into a folder."""
    metadata = read_metadata(path)
    config = read_config(path, metadata)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    config.architectures, config.dtype = [type(model).__name__], torch.float32
    config.save_pretrained(folder)
    save_tokenizer(path, metadata, folder)
    save_torch_state_dict(read_weights(path, metadata["general.architecture"], model), folder, max_shard_size=SHARD_BYTES)


def read_weights(path: Path, architecture: str, model: Any) -> dict[str, Tensor]:
    """Return the weights in float32 under transformers' names; model: without weights.

    Raises ValueError for tensors that are missing, unknown, of another shape, not finite, or of a type that the package gguf
    does not decode.
    """
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    with telling_damage(path, "is damaged or no GGUF file"):
        held = {tensor.name for tensor in GGUFReader(path).tensors}
    _check_names(path, held, get_gguf_hf_weights_map(model, processor), model.config.tie_word_embeddings)
    wrong = "holds tensors that are damaged, of another shape, or quantized in an unknown way"
    with telling_damage(path, wrong), np.errstate(all="ignore"):  # what is not finite is told below
        weights = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model, torch_dtype=torch.float32)["tensors"]
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    for name, weight in weights.items():
        if weight.shape != shapes[name]:
            raise ValueError(
                f"{path}: {name}: has the shape {list(weight.shape)}, the model's is {list(shapes[name])}; convert it again"
            )
        if not weight.isfinite().all():
            raise ValueError(f"{path}: {name}: holds values that are not finite; copy or download the file again")
    return dict(weights)


def _check_names(path: Path, held: set[str], names: dict[str, str], tied: bool) -> None:
    """Raise ValueError when a file holds fewer or other tensors than the model has."""
    wanted = {name if name.endswith((".weight", ".bias")) else f"{name}.weight" for name in names}
    wanted -= {"output.weight"} if tied else set()
    missing, unknown = sorted(wanted - held), sorted(held - wanted)
    if missing:
        raise ValueError(f"{path}: lacks {len(missing)} tensors of the model, such as {missing[0]}; convert the model again")
    if unknown:
        raise ValueError(
            f"{path}: {len(unknown)} tensors would be lost, such as {unknown[0]} (rope_freqs and rope_factors scale rotations, "
            "which no key of the file says); give the folder of the original transformers model"
        )
