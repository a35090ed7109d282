"""transformers' generate with a draft: the same arguments and texts, by speculative decoding.

Shapes: B rows, T tokens of the padded prompts.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.configuration_utils import GenerationMode

from longspec import methods
from longspec.chain_length import read_acceptance
from longspec.decode.cache import tokens_ahead
from longspec.decode.chain_costs import best_way, nodes_of
from longspec.decode.drafters import Drafter, check_drafter
from longspec.decode.levels import DEFAULT_SHAPE, Shape
from longspec.decode.lookup import WithLookup
from longspec.decode.prefill import check_decodable, check_prompts, prefill
from longspec.decode.speculate import speculate
from longspec.draft_vocabulary import tokenizer_hash_of
from longspec.families import check_target
from longspec.methods.draft_files import check_draft_config, method_of_draft
from longspec.models.target import draft_device

WARPS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)
MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
TEXT = ("input_ids", "attention_mask")  # the model's arguments that are the prompts
NOT_DONE = (  # settings of generate that show in no logits processor
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
    "max_time",
    "token_healing",
    "use_mtp",
    "prefill_chunk_size",
    "penalty_alpha",
    "dola_layers",
    "assistant_early_exit",
)


def load_drafter(target: Any, draft: str | Path, draft_vocabulary: str | Path | None = None) -> Drafter:
    """Return the drafter of a draft folder or weight file for this target, in its dtype; one can serve many calls.

    draft_vocabulary: file of the tokens to propose, for drafts without one of their own; None: all. Raises ValueError if the
    target is not supported, if the draft was made for another one, and if the vocabulary does not fit.
    """
    folder = target.config.name_or_path
    check_target(target.config, folder or "target")
    check_draft_config(draft, target.config)
    method = methods.method(method_of_draft(draft))
    methods.check_drafts_for(method.name, target.config.model_type, str(draft))
    path = None if draft_vocabulary is None else Path(draft_vocabulary)
    vocabulary = methods.chosen_vocabulary(method.name, path)
    if vocabulary is not None:
        tokenizer = tokenizer_hash_of(Path(folder)) if folder else None
        vocabulary.check_tokens(path, target.config.vocab_size, folder or "the target", tokenizer)
    settings = method.stored_settings(Path(draft))
    layer = method.layer(target.config, settings)
    method.load(layer, Path(draft), target.config, settings)
    drafter = methods.drafter(method.name, target, layer.to(draft_device(target), target.dtype).eval(), settings, vocabulary)
    drafter.acceptance = read_acceptance(Path(draft))
    return drafter


def generate(
    model: Any,
    inputs: Tensor | Mapping[str, Any] | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    draft: str | Path | Drafter,
    shape: Shape | None = None,
    draft_vocabulary: str | Path | None = None,
    prompt_lookup_num_tokens: int | None = None,
    generator: torch.Generator | None = None,
    tokenizer: Any = None,
    streamer: Any = None,
    **arguments: Any,
) -> Tensor:
    """Return int64 [B, T + new tokens] as `model.generate(inputs, generation_config, **arguments)` does, but sooner.

    draft: a draft folder, a weight file, or a drafter from load_drafter, which reads the draft once for many calls.
    shape: tokens of a chain (int), the levels of a tree, or its Budget; None: what pays best by the measured acceptance and by
    what rounds cost here, also plain decoding or prompt lookup alone, but the default tree for a draft without evaluation.
    draft_vocabulary: as for load_drafter. prompt_lookup_num_tokens: the most tokens that each round copies from the text,
    beside the drafted ones. inputs or input_ids: int64 [B, T], or as inputs what a tokenizer returns; attention_mask [B, T]
    marks padding, on either side. Settings come from `arguments`, else generation_config, else the model's own. They may be
    max_new_tokens or max_length, do_sample, temperature, top_k, top_p, eos_token_id, pad_token_id, stop_strings with
    tokenizer, num_return_sequences; streamer for one row. Sampled texts have generate's distribution, by draws of their own.
    Raises ValueError that names any other setting: none is ignored.
    """
    if isinstance(inputs, Mapping):  # as a tokenizer returns them
        arguments, inputs = {**inputs, **arguments}, None
    config, rest = model._prepare_generation_config(generation_config, **arguments)
    given = rest.get("input_ids") if inputs is None else inputs
    if inputs is not None and rest.get("input_ids") is not None:
        raise ValueError("inputs, input_ids: both were given, and are the same argument; leave one out")
    if not isinstance(given, Tensor) or given.ndim != 2 or given.dtype not in (torch.int64, torch.int32):
        raise ValueError("input_ids: give token ids [rows, tokens], int64 or int32")
    model._prepare_special_tokens(config, kwargs_has_attention_mask=True, device=given.device)  # _eos_ and _pad_token_tensor
    if config.max_new_tokens is None:  # as transformers counts: max_length includes the prompts; None if nobody has set it
        whole = [arguments.get("max_length"), generation_config and generation_config.max_length]
        whole += [generation_config is None and model.generation_config.max_length]
        config.max_new_tokens = next((length - given.shape[1] for length in whole if length), None)
    off = {"synced_gpus": False}  # what a caller may say, since it is so anyway
    _refuse(model, config, {name for name, value in rest.items() if name not in TEXT and value not in (None, off.get(name))})
    texts = _without_padding(given, rest.get("attention_mask"), config)
    prompts = [text for text in texts for _ in range(config.num_return_sequences)]
    # Whatever may be refused is refused before anything is streamed.
    drafter = _drafter(model, draft, draft_vocabulary, prompt_lookup_num_tokens)
    check_prompts(prompts, model.config.vocab_size)
    if streamer is not None:
        if len(prompts) > 1:
            raise ValueError(f"streamer: streams one text, these are {len(prompts)}; call once for each")
        streamer.put(given.cpu())
    sampling, start = sampling_settings(config), None
    if shape is None and drafter.acceptance:
        start = prefill(model, prompts, tokens_ahead(config.max_new_tokens, nodes_of(drafter)), drafter.reads)
        drafter, shape = best_way(model, drafter, start, **sampling)
        start = replace(start, is_last=True)
    stops = config.stop_strings
    decoded = speculate(
        model,
        drafter,
        start or prompts,
        max_new_tokens=config.max_new_tokens,
        shape=DEFAULT_SHAPE if shape is None else shape,
        **sampling,
        eos=config._eos_token_tensor,
        stop_strings=[stops] if isinstance(stops, str) else stops or (),
        tokenizer=tokenizer,
        on_tokens=None if streamer is None else lambda _, tokens: streamer.put(torch.tensor(tokens)),
        generator=generator,
    )
    if streamer is not None:
        streamer.end()
    new, pad = [torch.tensor(row.ids) for row in decoded.rows], config._pad_token_tensor
    if pad is None and len({len(ids) for ids in new}) > 1:
        raise ValueError("pad_token_id: texts ended at different lengths; give the token that fills them up")
    filled = torch.nn.utils.rnn.pad_sequence(new, batch_first=True, padding_value=0 if pad is None else int(pad))
    return torch.cat([given.repeat_interleave(config.num_return_sequences, 0), filled.to(given.device)], dim=1)


def _drafter(model: Any, draft: Any, draft_vocabulary: str | Path | None, copied: int | None) -> Drafter:
    """Return the drafter, checked against the model. copied: the most tokens of prompt lookup beside it; None: no lookup."""
    check_decodable(model)
    if isinstance(draft, str | Path):
        draft = load_drafter(model, draft, draft_vocabulary)
    elif draft_vocabulary is not None:
        raise ValueError(f"draft_vocabulary: {draft_vocabulary}: the drafter is made already; give it to load_drafter")
    check_drafter(draft, model)
    return draft if copied is None else WithLookup(draft, copied)


def _refuse(model: Any, config: GenerationConfig, strange: set[str]) -> None:
    """Raise ValueError that names the settings that would change the text and are not done here."""
    if config.max_new_tokens is None:
        raise ValueError("max_new_tokens: say how many tokens there may be, or by max_length how many with the prompt")
    if config.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens, max_length: leave room for {config.max_new_tokens} new tokens; give more")
    if config.prompt_lookup_num_tokens:
        raise ValueError("prompt_lookup_num_tokens: stands in the generation config; give it as an argument, and None there")
    wanted = [name for name in NOT_DONE if getattr(config, name, None)]
    wanted += ["cache_implementation"] if config.cache_implementation not in (None, "dynamic") else []
    wanted += ["use_cache"] if config.use_cache is False else []
    if wanted:
        fix = "leave it out, or overrule the target's generation config by an argument, such as use_cache=True"
        raise ValueError(f"{', '.join(wanted)}: not done with a draft; {fix}")
    if strange:
        raise ValueError(f"{', '.join(sorted(strange))}: not taken when decoding with a draft; leave it out")
    mode = config.get_generation_mode()
    if mode not in MODES:
        raise ValueError(f"{mode.value}: not done with a draft; give do_sample=True or False, and no beams")
    prompt = torch.zeros(1, 1, dtype=torch.int64)  # transformers makes some processors only where it is given a prompt
    lengths = {"input_ids_seq_length": 1, "encoder_input_ids": prompt, "device": "cpu", "model_kwargs": {}}
    processors = model._get_logits_processor(config, **lengths)
    others = [type(processor).__name__ for processor in processors if not isinstance(processor, WARPS)]
    if others:
        raise ValueError(
            f"{', '.join(others)}: of what changes the target's logits only temperature, top_k and top_p are done with a "
            "draft; switch it off in the arguments or in generation_config"
        )


def sampling_settings(config: GenerationConfig) -> dict[str, Any]:
    """Return the sampler's temperature, top_k and top_p by a generation config; temperature 0 if it does not sample."""
    if not config.do_sample:
        return {"temperature": 0.0}
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}  # what None stands for
    return {name: value if getattr(config, name) is None else getattr(config, name) for name, value in off.items()}


def _without_padding(ids_BT: Tensor, attention_mask_BT: Tensor | None, config: GenerationConfig) -> list[list[int]]:
    """Return the texts of padded rows. Without a mask, padding is the padding token, unless that ends texts, as elsewhere."""
    if attention_mask_BT is None:
        pad, eos = config._pad_token_tensor, config._eos_token_tensor
        if pad is not None and (eos is None or not torch.isin(eos, pad).any()):
            attention_mask_BT = ids_BT.ne(pad)
        elif len(ids_BT) == 1:
            attention_mask_BT = torch.ones_like(ids_BT)
        else:
            raise ValueError(
                "attention_mask: several rows need it where no pad_token_id other than eos_token_id tells what is padding; the "
                "tokenizer gives it"
            )
    if attention_mask_BT.shape != ids_BT.shape:
        raise ValueError(f"attention_mask: is {list(attention_mask_BT.shape)}, the ids are {list(ids_BT.shape)}")
    return [ids_T[mask_T.bool()].tolist() for ids_T, mask_T in zip(ids_BT, attention_mask_BT, strict=True)]
