"""A GGUF file's model as transformers' configuration, and its tokenizer; whatever these would lose is refused.

transformers' reader takes the keys and tensors that it knows and lets go of the rest, such as a scaling of rotations: the
model it makes then is another one. Where it does not know the name of a way to split text (`tokenizer.ggml.pre`) it splits as
GPT-2 does, and the tokens are others than in training: names that are not known here are refused.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer, read_gguf_metadata
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
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
TAKEN = {"attention.key_length": "head_dim", "expert_feed_forward_length": "moe_intermediate_size"}  # transformers does not
END = "tokenizer.ggml.eos_token_id"
MODEL, PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
# Names that llama.cpp has for one way to split: every digit by itself, then as GPT-2; and as GPT-2 alone.
DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell")
AS_GPT2 = ("gpt-2", "mpt", "olmo", "jais")
COMPOSED = ("qwen2", "deepseek-r1-qwen")  # Qwen's own tokenizers compose characters (NFC) first, which no key of GGUF says


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the keys of a GGUF file; of a list of texts, how many these are.

    Raises ValueError for a damaged file, for a model that is not supported, and for one without a tokenizer.
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
    """transformers' configuration of the model. Raises ValueError for keys that it cannot say, and as of check_target."""
    architecture = metadata["general.architecture"]
    values = {name: metadata[f"{architecture}.{key}"] for key, name in TAKEN.items() if f"{architecture}.{key}" in metadata}
    values["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")  # else transformers assumes one
    with telling_damage(path, "holds no model that transformers can read"):
        config = AutoConfig.for_model(**load_gguf_checkpoint(path)["config"] | values)
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


def save_tokenizer(path: Path, metadata: dict[str, Any], folder: Path) -> None:
    """Write the files of a GGUF file's tokenizer, with its chat template where it has one, into the folder of its config.json.

    Raises ValueError for a way to split that is not known or not the family's, and for a tokenizer that cannot be read.
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
    # The classes of some families (Qwen) take the vocabulary alone and split it in their own way.
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
    """Return a tokenizer without what transformers adds to the file's tokens: the embedding has no rows for it."""
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < tokens]
    return Tokenizer.from_str(json.dumps(content))
