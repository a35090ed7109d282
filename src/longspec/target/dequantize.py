"""The target of a GGUF file, as a transformers folder: the `dequantize` verb.

Weights are written in float32, 4 bytes each: a scale in float16 times a small integer is exact there, and rounded in bfloat16.
One layer is held at a time, and what waits for the rest of its file (SHARD_BYTES).
"""

import logging
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from longspec.atomic_files import new_folder, read_json, sha256_file, write_json
from longspec.models.model_folder import INDEX, WEIGHT_MAP
from longspec.models.weight_files import telling_damage
from longspec.target.fetch import check_folder, write_manifests
from longspec.target.gguf_file import read_config, read_metadata, save_tokenizer

LOG = logging.getLogger(__name__)
SHARD_BYTES = 2 * 2**30
WEIGHTS = "model.safetensors"


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
    save_shards(tensors_of(path, metadata["general.architecture"], model), model, folder)


def tensors_of(path: Path, architecture: str, model: Any) -> Iterator[dict[str, Tensor]]:
    """Yield the weights in float32 under transformers' names, layer by layer.

    model: without weights. Raises ValueError for tensors that are missing, unknown, of another shape, not finite, or quantized
    in a way that the package gguf does not undo.
    """
    with telling_damage(path, "is damaged or no GGUF file"):
        tensors = sorted(GGUFReader(path).tensors, key=_part)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    names = get_gguf_hf_weights_map(model, processor)
    _check_names(path, {tensor.name for tensor in tensors}, names, model.config.tie_word_embeddings)
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    for _, part in groupby(tensors, key=_part):
        parsed: dict[str, Any] = {"tensors": {}}  # experts' halves are put together in it
        for tensor in part:
            weights = _dequantized(path, tensor)
            with telling_damage(path, f"tensor {tensor.name}: has not the shape of the model"):
                done = processor.process(weights, tensor.name, tensor_key_mapping=names, parsed_parameters=parsed)
            if done.name is not None:
                parsed["tensors"][names[done.name]] = torch.from_numpy(np.copy(done.weights))
        for name, weight in parsed["tensors"].items():
            if weight.shape != shapes[name]:
                raise ValueError(
                    f"{path}: {name}: has the shape {list(weight.shape)}, the model's is {list(shapes[name])}; convert it again"
                )
        yield parsed["tensors"]


def _part(tensor: Any) -> tuple[int, str]:
    """Return a tensor's layer (blk.<number>.<name>), whose parts come together; -1 and its own name for one of no layer."""
    parts = tensor.name.split(".")
    return (int(parts[1]), "") if parts[0] == "blk" and parts[1].isdecimal() else (-1, tensor.name)


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


def _dequantized(path: Path, tensor: Any) -> np.ndarray:
    try:
        with np.errstate(all="ignore"):  # what is not finite is told below
            weights = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise ValueError(
            f"{path}: tensor {tensor.name}: type {tensor.tensor_type.name} is not supported; quantize the model in another "
            "way, such as Q8_0 or Q4_K_M"
        ) from None
    if not np.isfinite(weights).all():
        raise ValueError(f"{path}: tensor {tensor.name}: holds values that are not finite; copy or download the file again")
    return np.asarray(weights, dtype=np.float32)


def save_shards(parts: Iterator[dict[str, Tensor]], model: Any, folder: Path) -> None:
    """Write a model's tensors as model.safetensors, or with an index as several such files of about SHARD_BYTES.

    A file is written as soon as all of its tensors have come. model: without weights.
    """
    empty = {name: weight for name, weight in model.state_dict().items() if name not in model.all_tied_weights_keys}
    plan = split_torch_state_dict_into_shards(empty, max_shard_size=SHARD_BYTES)
    waiting, held = dict(plan.filename_to_tensors), dict[str, Tensor]()
    for part in parts:
        held |= part
        for file in [file for file, names in waiting.items() if held.keys() >= set(names)]:
            save_file({name: held.pop(name) for name in waiting.pop(file)}, folder / file, metadata={"format": "pt"})
    assert not waiting, f"nothing has brought the tensors of {waiting}"
    LOG.info("%d tensors, %.2f GB in float32", len(empty), plan.metadata["total_size"] / 1e9)
    if plan.is_sharded:
        write_json(folder / f"{WEIGHTS}{INDEX}", {"metadata": plan.metadata, WEIGHT_MAP: plan.tensor_to_filename})
