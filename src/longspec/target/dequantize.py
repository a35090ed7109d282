"""Make a transformers folder from a GGUF file: the `dequantize` verb. It refuses whatever transformers would lose.

transformers' reader takes the keys and tensors that it knows and drops the rest, such as a scaling of rotations; the result
would be another model. If it does not know the name of a way to split text (`tokenizer.ggml.pre`), it splits as GPT-2 does, and
the tokens would differ from those in training. So unknown names are refused here.

Weights are written in float32, 4 bytes each: a float16 scale times a small integer is exact there, but rounded in bfloat16. All
of them are in memory at once.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from huggingface_hub import save_torch_state_dict
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer, read_gguf_metadata
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)

from longspec.atomic_files import new_folder, read_json, sha256_file
from longspec.families import OF_GGUF, check_target
from longspec.models.target import head_width
from longspec.models.weight_files import check_file, telling_damage
from longspec.target.fetch import check_folder, write_manifests

SHARD_BYTES = 2 * 2**30
NEEDED = (  # if one is missing, transformers and llama.cpp assume different values
    "context_length",
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "rope.freq_base",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
)
TAKEN = {"attention.key_length": "head_dim", "expert_feed_forward_length": "moe_intermediate_size"}  # transformers drops these
END = "tokenizer.ggml.eos_token_id"
MODEL, PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
# llama.cpp's names for two ways to split: every digit by itself, then as GPT-2; and as GPT-2 alone.
DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell")
AS_GPT2 = ("gpt-2", "mpt", "olmo", "jais")
COMPOSED = ("qwen2", "deepseek-r1-qwen")  # Qwen's own tokenizers first compose characters (NFC), which no GGUF key says


def make(source: str, sha256: str | None, fetched: Path | None, out_target: Path, out_tokenizer: Path) -> None:
    """Write a target's folder and both manifests from a GGUF file: `source`, or the one in the manifest `fetched`.

    Raises ValueError if the hash is not `sha256`, or if the file is missing, damaged or of a model that is not supported.
    """
    for out in (out_target, out_tokenizer):
        out.unlink(missing_ok=True)
    path = (Path(source).expanduser() if fetched is None else Path(read_json(fetched)["path"])).absolute()
    if not path.is_file():
        raise ValueError(f"recipe.model.source: {source}: {path}: no such file; place it there, or correct the path")
    found = sha256_file(path)
    if sha256 is not None and found != sha256:
        raise ValueError(f"recipe.model.sha256: is {sha256}, that of {path} is {found}; copy it again, or correct the key")
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
    """Return the weights in float32 under transformers' names. model: on the meta device.

    Raises ValueError for tensors that are missing, unknown, of another shape, not finite, or of a type that the package gguf
    does not decode.
    """
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    with telling_damage(path, "is damaged or no GGUF file"):
        held = {tensor.name for tensor in GGUFReader(path).tensors}
    _check_names(path, held, get_gguf_hf_weights_map(model, processor), model.config.tie_word_embeddings)
    wrong = "holds tensors that are damaged, of another shape, or quantized in an unknown way"
    with telling_damage(path, wrong), np.errstate(all="ignore"):  # values that are not finite are reported below
        weights = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model, torch_dtype=torch.float32)["tensors"]
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    for name, weight in weights.items():
        if weight.shape != shapes[name]:
            raise ValueError(f"{path}: {name}: has shape {list(weight.shape)}, not {list(shapes[name])}; convert it again")
        if not weight.isfinite().all():
            raise ValueError(f"{path}: {name}: holds values that are not finite; copy or download the file again")
    return dict(weights)


def _check_names(path: Path, held: set[str], names: dict[str, str], tied: bool) -> None:
    """Raise ValueError if the file lacks a tensor of the model or has further ones."""
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


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the keys of a GGUF file; a list of texts may be replaced by its length.

    Raises ValueError for a damaged file, a part of a model, an unsupported model, and one without a tokenizer.
    """
    check_file(path)
    with telling_damage(path, "is damaged or no GGUF file"):
        metadata, _ = read_gguf_metadata(str(path))
    architecture = metadata.get("general.architecture")
    if architecture not in OF_GGUF:
        raise ValueError(
            f"{path}: general.architecture {architecture!r} is not supported as GGUF; supported are "
            f"{', '.join(OF_GGUF)}; of others give the folder of a transformers model"
        )
    if metadata.get("split.count", 1) != 1:
        raise ValueError(f"{path}: is a part of a model; put its parts together first: llama-gguf-split --merge")
    needed = [*(f"{architecture}.{key}" for key in NEEDED), "tokenizer.ggml.model", "tokenizer.ggml.tokens", END]
    if missing := [key for key in needed if key not in metadata]:
        raise ValueError(f"{path}: lacks {', '.join(missing)}; convert the model again with a current llama.cpp")
    return metadata


def read_config(path: Path, metadata: dict[str, Any]) -> Any:
    """Return transformers' configuration of the model. Raises ValueError for keys that it cannot hold, and as check_target."""
    architecture = metadata["general.architecture"]
    values = {name: metadata[f"{architecture}.{key}"] for key, name in TAKEN.items() if f"{architecture}.{key}" in metadata}
    values["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")  # else transformers assumes one
    with telling_damage(path, "holds no model that transformers can read"):
        config = AutoConfig.for_model(**load_gguf_checkpoint(path)["config"] | values)
    check_target(config, path)
    _check_carried(path, metadata, config)
    vars(config).pop("_model_name_or_path", None)  # it would hold the model's title
    return config


def _check_carried(path: Path, metadata: dict[str, Any], config: Any) -> None:
    """Raise ValueError for a key of the model that the configuration cannot hold."""
    architecture = metadata["general.architecture"]
    carried = {key for key, name in GGUF_CONFIG_MAPPING[config.model_type].items() if name} | TAKEN.keys()
    # Further keys that are often there -> the value with which nothing is lost.
    as_ever = {
        "rope.dimension_count": head_width(config),
        "attention.value_length": head_width(config),
        "rope.scaling.type": "none",
    }
    for key, value in metadata.items():
        name = key.removeprefix(f"{architecture}.")
        if name == key or (name in carried and name != "rope.dimension_count") or as_ever.get(name) == value:
            continue
        raise ValueError(
            f"{path}: {key} is {value!r}, which a configuration made of a GGUF file cannot say; give the folder of the "
            "original transformers model"
        )


def save_tokenizer(path: Path, metadata: dict[str, Any], folder: Path) -> None:
    """Write the tokenizer's files of a GGUF file, with its chat template if it has one, into `folder`, next to config.json.

    Raises ValueError if the way to split is not known or not the family's, and if the tokenizer cannot be read.
    """
    kind, pre = metadata[MODEL], metadata.get(PRE)
    known = sorted({*GGUF_PRE_TOKENIZER_SPLITS, *DIGITS_APART, *AS_GPT2})
    if kind == "gpt2" and pre not in known:
        raise ValueError(
            f"{path}: {PRE} {pre!r} is not known, so its tokens would be others than the model's; known are "
            f"{', '.join(known)}; give the folder of the original transformers model"
        )
    with telling_damage(path, "holds no tokenizer that transformers can read"):
        architecture, content, settings = get_gguf_tokenizer(str(path))
        converted, _ = convert_gguf_tokenizer(architecture, content)
        tokenizer = _of_the_file_alone(converted, len(content["tokens"]))
        if kind == "gpt2" and pre in DIGITS_APART:
            digits = pre_tokenizers.Digits(individual_digits=True)
            as_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, as_gpt2])
        if kind == "gpt2" and pre in COMPOSED:
            tokenizer.normalizer = normalizers.NFC()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings).save_pretrained(folder)
    # Some families' tokenizer classes (Qwen) take only the vocabulary from the files and split in their own way.
    if _splitting(AutoTokenizer.from_pretrained(folder, trust_remote_code=False).backend_tokenizer) != _splitting(tokenizer):
        raise ValueError(
            f"{path}: {PRE} {pre!r} is another way to split text than transformers has for {architecture}; give the folder of "
            "the original transformers model"
        )


def _splitting(tokenizer: Tokenizer) -> list[Any]:
    """Return a tokenizer's normalizer and pre-tokenizer, as its file has them."""
    content = json.loads(tokenizer.to_str())
    return [content["normalizer"], content["pre_tokenizer"]]


def _of_the_file_alone(tokenizer: Tokenizer, tokens: int) -> Tokenizer:
    """Return a tokenizer without tokens that transformers adds to the file's: the embedding has no rows for them."""
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < tokens]
    return Tokenizer.from_str(json.dumps(content))
