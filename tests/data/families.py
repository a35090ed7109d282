"""Small tokenizers and chat templates that behave as those of well-known families do; the words are our own."""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from longspec.data.chat.encoding import Encoded, Encoder
from longspec.demo import puzzles
from tests.data.agent_families import AGENTS, R1

# Contents trimmed, a header with the date in the system message, the beginning of sequence in the text.
LLAMA = """{{ bos_token }}{% set day = strftime_now("%d %b %Y") %}
{% if messages[0].role == 'system' %}{% set first = messages[0].content | trim %}{% set turns = messages[1:] %}
{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}
{{ '<|start|>system<|stop|>\\n\\nKnown until: May 2023\\nToday: ' + day + '\\n\\n' + first + '<|turn_end|>' }}
{%- for turn in turns %}
{{- '<|start|>' + turn.role + '<|stop|>\\n\\n' + turn.content | trim + '<|turn_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|stop|>\\n\\n' }}{% endif %}"""

# A system line of its own where none is given.
QWEN25 = """{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe of help.<|im_end|>\\n' }}{% endif %}
{%- for turn in messages %}{{ '<|im_start|>' + turn.role + '\\n' + turn.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# The reasoning of answers before the last question is left out, that behind it is laid out anew.
QWEN3 = """{% set ns = namespace(last=0) %}
{%- for turn in messages %}{% if turn.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for turn in messages %}
{%- if turn.role != 'assistant' %}{{ '<|im_start|>' + turn.role + '\\n' + turn.content + '<|im_end|>\\n' }}
{%- else %}{% set said = turn.content %}{% set thought = '' %}
{%- if '</think>' in said %}{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set said = said.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{%- if loop.index0 > ns.last %}{{ '<|im_start|>assistant\\n<think>\\n' + thought }}
{{- '\\n</think>\\n\\n' + said + '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>assistant\\n' + said + '<|im_end|>\\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Roles must alternate; the system message stands before the last question; the answer follows a space.
MISTRAL = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{% set first = messages[0].content %}{% set turns = messages[1:] %}
{%- else %}{% set turns = messages %}{% endif %}
{%- for turn in turns %}
{%- if (turn.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('user and assistant must take turns') }}{% endif %}
{%- if turn.role == 'user' %}{{ '[INST] ' }}
{%- set left = turns[loop.index0:] | selectattr('role', 'equalto', 'user') | list %}
{%- if first is defined and left | length == 1 %}{{ first + '\\n\\n' }}{% endif %}
{{- turn.content + ' [/INST]' }}
{%- else %}{{ ' ' + turn.content | trim + eos_token }}{% endif %}
{%- endfor %}"""

# A token of its own after the last answer; white space behind its turn tokens belongs to them.
PHI = """{% for turn in messages %}{{ '<|' + turn.role + '|>\\n' + turn.content + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

# Marks what is generated.
MARKED = """{% for turn in messages %}{{ '<|im_start|>' + turn.role + '\\n' }}
{%- if turn.role == 'assistant' %}{% generation %}{{ turn.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}{{ turn.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# No token ends a turn.
PLAIN = """{% for turn in messages %}{{ ('Q: ' if turn.role == 'user' else 'A: ') + turn.content + '\\n\\n' }}{% endfor %}
{%- if add_generation_prompt %}A:{% endif %}"""

# Template, special tokens, tokens that are not, bos, eos.
FAMILIES: dict[str, tuple[str, list[str], list[str], str | None, str]] = {
    "llama": (LLAMA, ["<|start|>", "<|stop|>", "<|turn_end|>"], [], "<|begin|>", "<|turn_end|>"),
    "qwen2.5": (QWEN25, ["<|im_start|>", "<|im_end|>"], [], None, "<|im_end|>"),
    "qwen3": (QWEN3, ["<|im_start|>", "<|im_end|>"], ["<think>", "</think>"], None, "<|im_end|>"),
    "mistral": (MISTRAL, ["[INST]", "[/INST]"], [], "<s>", "</s>"),
    "r1": (R1, ["<|User|>", "<|Assistant|>"], ["<think>", "</think>"], "<|bos|>", "<|eos|>"),
    "phi": (PHI, ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"], [], None, "<|endoftext|>"),
    "marked": (MARKED, ["<|im_start|>", "<|im_end|>"], [], None, "<|im_end|>"),
    "plain": (PLAIN, [], [], None, "<|endoftext|>"),
}


def texts() -> list[str]:
    return [record["qwq"] for _, record in puzzles.generate(20, seed=5)]


def byte_level() -> Tokenizer:
    """A byte-level BPE, as most families have it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts(), trainer)
    return backend


def spaces_in_words() -> Tokenizer:
    """As the sentencepiece tokenizers of Llama 2 and Mistral were: a space opens every text, and decoding drops it."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    alphabet = [chr(code) for code in range(32, 127)] + ["\n", "▁"]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>"], initial_alphabet=alphabet, limit_alphabet=200, show_progress=False
    )
    backend.train_from_iterator(texts(), trainer)
    return backend


def family(name: str, backend: Tokenizer) -> Any:
    """A tokenizer of a family, or of one of those that know tools."""
    from transformers import PreTrainedTokenizerFast

    template, special, plain, bos, eos = (FAMILIES | AGENTS)[name]
    backend = Tokenizer.from_str(backend.to_str())
    backend.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False, rstrip=name == "phi")
            for token in [*special, *filter(None, [bos, eos])]
        ]
    )
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    # Only bos and eos are named, as with Llama 3: the others are special without a role.
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, pad_token=eos, bos_token=bos)
    tokenizer.chat_template = template
    return tokenizer


def encoded(tokenizer: Any, record: dict[str, Any]) -> list[Encoded]:
    """The documents of a record."""
    return Encoder(tokenizer).documents(record)


def stretches(tokenizer: Any, document: Encoded, kind: int = 1) -> list[str]:
    """The decoded text of each stretch of trained tokens (kind 1), or of untrained ones (0)."""
    texts, run = [], []
    for token, trained in zip([*document.ids.tolist(), -1], [*document.answer_mask.tolist(), 1 - kind], strict=True):
        if trained == kind:
            run.append(token)
        elif run:
            texts.append(tokenizer.decode(run, skip_special_tokens=False))
            run = []
    return texts
