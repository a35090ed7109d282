"""What a GGUF file says of its model, as transformers' configuration; whatever that would lose is refused.

transformers' reader takes the keys and tensors that it knows and lets go of the rest, such as a scaling of rotations: the
model it makes then is another one.
"""

import math
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.integrations import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf import read_gguf_metadata
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from longspec.families import OF_GGUF, check_target
from longspec.models.target import head_width
from longspec.models.weight_files import check_file, telling_damage

NEEDED = (  # where one is missing, transformers and llama.cpp assume different things
    "context_length",
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "rope.freq_base",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
)
POSITIVE = ("rope.freq_base", "attention.layer_norm_rms_epsilon")
COUNTS = (  # of what there is at least one
    *(key for key in NEEDED if key not in POSITIVE),
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
)
TAKEN = {"attention.key_length": "head_dim", "expert_feed_forward_length": "moe_intermediate_size"}  # transformers does not
END = "tokenizer.ggml.eos_token_id"


def read_metadata(path: Path) -> dict[str, Any]:
    """The keys of a GGUF file; of a list of texts, how many these are.

    Raises ValueError for a damaged file, for a model that is not supported, and for one without a tokenizer.
    """
    check_file(path)
    with telling_damage(path, "is damaged or no GGUF file"):
        metadata, tensors = read_gguf_metadata(str(path))
    architecture = metadata.get("general.architecture")
    if architecture not in OF_GGUF:
        raise ValueError(
            f"{path}: general.architecture {architecture!r} is not supported as GGUF; supported are "
            f"{', '.join(OF_GGUF)}; of others give the folder of a transformers model"
        )
    if metadata.get("split.count", 1) != 1:
        raise ValueError(
            f"{path}: is one of {metadata['split.count']} parts of a model; put them together first: llama-gguf-split --merge"
        )
    needed = [*(f"{architecture}.{key}" for key in NEEDED), "tokenizer.ggml.model", "tokenizer.ggml.tokens", END]
    if missing := [key for key in needed if key not in metadata]:
        raise ValueError(f"{path}: lacks {', '.join(missing)}; convert the model again with a current llama.cpp")
    _check_values(path, metadata, architecture)
    layers = len({name.split(".")[1] for name in tensors if name.startswith("blk.")})
    if metadata[f"{architecture}.block_count"] != layers:  # a model of as many layers as a damaged key says may fill the memory
        told = metadata[f"{architecture}.block_count"]
        raise ValueError(f"{path}: {architecture}.block_count is {told!r}, it holds {layers} layers; download it again")
    return metadata


def _check_values(path: Path, metadata: dict[str, Any], architecture: str) -> None:
    """Raise ValueError, with the key, for a number of the model that is none, or out of its range."""
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens = tokens if isinstance(tokens, int) else len(tokens)
    for key, value in metadata.items():
        name = key.removeprefix(f"{architecture}.")
        if name in COUNTS:
            fits, wanted = type(value) is int and 1 <= value < 2**32, "a whole number from 1 on"
        elif name in POSITIVE:
            fits, wanted = isinstance(value, float) and 0 < value < math.inf, "a number above 0"
        elif key.startswith("tokenizer.ggml.") and key.endswith("_token_id"):
            fits, wanted = type(value) is int and 0 <= value < tokens, f"one of the {tokens} tokens, from 0 on"
        else:
            continue
        if not fits:
            raise ValueError(f"{path}: {key} is {value!r}, must be {wanted}; download or convert the model again")
    width, heads = (metadata[f"{architecture}.{name}"] for name in ("embedding_length", "attention.head_count"))
    groups = metadata[f"{architecture}.attention.head_count_kv"]
    if heads % groups or (width % heads and f"{architecture}.attention.key_length" not in metadata):
        raise ValueError(
            f"{path}: {architecture}.attention.head_count is {heads}: embedding_length {width} and head_count_kv {groups} "
            "do not fit; download or convert the model again"
        )


def read_config(path: Path, metadata: dict[str, Any]) -> Any:
    """transformers' configuration of the model. Raises ValueError for keys that it cannot say, and as of check_target."""
    architecture = metadata["general.architecture"]
    told = {name: metadata[f"{architecture}.{key}"] for key, name in TAKEN.items() if f"{architecture}.{key}" in metadata}
    told["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")  # else transformers assumes one
    with telling_damage(path, "holds no model that transformers can read"):
        config = AutoConfig.for_model(**load_gguf_checkpoint(path)["config"] | told)
    check_target(config, path)
    _check_carried(path, metadata, config)
    vars(config).pop("_model_name_or_path", None)  # the model's title
    return config


def _check_carried(path: Path, metadata: dict[str, Any], config: Any) -> None:
    """Raise ValueError for a key of the model that the configuration does not have."""
    architecture = metadata["general.architecture"]
    carried = {key for key, name in GGUF_CONFIG_MAPPING[config.model_type].items() if name} | TAKEN.keys()
    # What else is often there, and what it must say for nothing to be lost.
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
