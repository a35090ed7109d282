"""The tokenizer of a GGUF file, as the model was trained with it.

Where transformers does not know the name of a way to split text (`tokenizer.ggml.pre`) it splits as GPT-2 does, and the tokens
are others than in training. Names that are not known here are refused.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from longspec.models.weight_files import telling_damage

MODEL, PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
# Names that llama.cpp has for one way to split: every digit by itself, then as GPT-2; and as GPT-2 alone.
DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell")
AS_GPT2 = ("gpt-2", "mpt", "olmo", "jais")
COMPOSED = ("qwen2", "deepseek-r1-qwen")  # Qwen's own tokenizers compose characters (NFC) first, which no key of GGUF says


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
    """A tokenizer's normalizer and pre-tokenizer, as its file has them."""
    content = json.loads(tokenizer.to_str())
    return [content["normalizer"], content["pre_tokenizer"]]


def _of_the_file_alone(tokenizer: Tokenizer, tokens: int) -> Tokenizer:
    """A tokenizer without what transformers adds to the file's tokens: the embedding has no rows for it."""
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < tokens]
    return Tokenizer.from_str(json.dumps(content))
