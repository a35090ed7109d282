"""Train our own byte-level BPE on a sample in which every dataset has the same weight."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from longspec import jsonl
from longspec.atomic_files import checked_file, new_folder, read_json
from longspec.config import Build
from longspec.data.chat.chat_template import CHATML
from longspec.data.read.records import Text, to_messages_or_text
from longspec.draft_vocabulary import tokenizer_files
from longspec.target.fetch import write_manifest

END_OF_TEXT = "<|endoftext|>"
SPECIAL = [END_OF_TEXT, "<|im_start|>", "<|im_end|>"]
SAMPLE_CHARACTERS = 1_500_000  # from each dataset; more hardly changes a merge of a small vocabulary


def texts_of(train: Path) -> list[str]:
    """Return the text of every record of a raw train.jsonl; for conversations each message's content."""
    texts = []
    for record in jsonl.read(train):
        made = to_messages_or_text(record)
        texts += [made.prompt + made.text] if isinstance(made, Text) else [message["content"] for message in made.messages]
    return texts


def sample(texts: list[str], characters: int, seed: int) -> Iterator[str]:
    """Yield exactly `characters` characters of text in a seeded order; if the texts are fewer, they repeat."""
    order = list(range(len(texts)))
    random.Random(seed).shuffle(order)
    left = characters
    for number in itertools.cycle(order):
        yield texts[number][:left]
        left -= len(texts[number])
        if left <= 0:
            return


def train_bpe(texts: Iterator[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE of `vocabulary` entries: special tokens, the 256 bytes, merges in order of frequency.

    Decoding restores text byte for byte, except for characters that Unicode composes (NFC).
    """
    tokenizer = Tokenizer(models.BPE())
    # Normalizer and splits are Qwen2's: next to a qwen2 config.json, transformers builds its Qwen2Tokenizer from the merges
    # alone, whatever tokenizer.json says, and it must give the same ids.
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def make(build: Build, raw: list[Path], out: Path) -> None:
    """Train the tokenizer, write its folder next to the manifest `out`, then the manifest.

    Raises ValueError if the text is too short for the vocabulary.
    """
    texts = {}
    for path in raw:
        name = read_json(path)["name"]
        texts[name] = texts_of(checked_file(path, "train.jsonl"))
    samples = (sample(texts[name], SAMPLE_CHARACTERS, build.seed) for name in sorted(texts))
    trained = train_bpe(itertools.chain.from_iterable(samples), build.vocabulary)
    if trained.get_vocab_size() != build.vocabulary:
        raise ValueError(
            f"build.vocabulary: the text yields {trained.get_vocab_size()} entries, not {build.vocabulary}; "
            "lower it or bring more text"
        )
    folder = out.parent / "tokenizer"
    out.unlink(missing_ok=True)  # an old manifest must not describe another tokenizer's files
    with new_folder(folder) as beside:
        PreTrainedTokenizerFast(
            tokenizer_object=trained,
            eos_token=END_OF_TEXT,
            pad_token=END_OF_TEXT,
            additional_special_tokens=SPECIAL[1:],
            chat_template=CHATML,
            model_max_length=build.max_position,
            clean_up_tokenization_spaces=False,
        ).save_pretrained(beside)
    sampled = {name: {"texts": len(texts[name]), "characters": sum(map(len, texts[name]))} for name in sorted(texts)}
    write_manifest(out, folder, "build", tokenizer_files(folder), vocabulary=build.vocabulary, texts=sampled)
