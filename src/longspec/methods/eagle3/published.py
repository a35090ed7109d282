"""EAGLE-3 drafts that other trainers published, read into the house's own tensors and settings.

Two layouts. That of the engines (SGLang's trainer, AngelSlim, the authors of EAGLE-3): `midlayer.*` and a config.json whose
fields are the layer's. That of the package `speculators`: `layers.0.*`, and the layer's fields in `transformer_layer_config`.
Fields that are left out have LlamaConfig's defaults, as both engines take them: so most drafts for Llama-3.1 turn by a
rope_theta of 10,000, which is not their target's. What each field means to which engine: engine_config.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from longspec.distributed import log
from longspec.methods.eagle3.published_fields import Fields, check_represented
from longspec.methods.eagle3.settings import AUXILIARY, ROPE, SHAPE, Settings, check_shape, check_values, layers_of
from longspec.methods.eagle3.shape import layer_config
from longspec.methods.eagle3.vocabulary_tensors import D2T, T2D, ids_of
from longspec.models.target import head_width
from longspec.models.weight_files import read_folder, telling_damage

EMBEDDINGS, HEAD = "embed_tokens.weight", "lm_head.weight"
# Of the target, or computed: nothing that a draft of ours holds.
NOT_THE_DRAFTS = ("verifier_norm.weight", "verifier_lm_head.weight")
INVERSE_FREQUENCIES = "rotary_emb.inv_freq"
ELSEWHERE = "correct a copy of the folder, or take another draft"


def read_published(
    folder: Path, config: dict[str, Any], target: Any, embeddings: Callable[[], Tensor], layers: tuple[int, ...] | None
) -> tuple[dict[str, Tensor], Settings]:
    """The state dict of our layer, and its settings, of a published draft for a target of this configuration.

    config: of its config.json; embeddings: reads the target's, [T, H]; layers: of the target, whose inputs the draft reads, for
    folders that do not say it beyond doubt. Raises ValueError with file, key and both values for what we cannot represent.
    """
    file = folder / "config.json"
    fields = Fields(file, config)
    with telling_damage(file, "is no configuration of a draft"):
        layer = LlamaConfig(**fields.of_llama())
    check_represented(fields, layer, target)
    state = _own_names(read_folder(folder), folder)
    _check_embeddings(state.pop(EMBEDDINGS, None), embeddings, folder)
    vocabulary, ids = _vocabulary(state, fields, target.vocab_size, folder)
    settings = Settings(
        layers=_layers(fields, target.num_hidden_layers, layers),
        vocabulary=vocabulary,
        sliding_window=fields.sliding_window(),
        fc_norm=fields.flag("fc_norm"),
        norm_output=fields.flag("norm_output"),
        norm_before_residual=fields.flag("norm_before_residual"),
        norm_before_fc=fields.flag("norm_before_fc"),
        **_shape(layer, target, file),
        steps=fields.steps(),
        ids=ids,
        target_vocabulary=None if ids is None else target.vocab_size,
    )
    check_values(vars(settings), str(file), ELSEWHERE)
    own, wanted = layer.max_position_embeddings, target.max_position_embeddings
    if own < wanted:
        log(
            f"warning: {file}: max_position_embeddings: is {own}, the target has {wanted}: it was hardly trained on longer "
            f"texts, and its acceptance falls beyond {own} tokens; train it on rows that are as long as the texts to be drafted"
        )
    return state, settings


def _own_names(found: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Tensors by our names. Raises ValueError for two of one name."""
    own: dict[str, Tensor] = {}
    for name, tensor in found.items():
        plain = name.removeprefix("model.")
        if plain in NOT_THE_DRAFTS or plain.endswith(INVERSE_FREQUENCIES):
            log(f"{folder}: {name}: left out, it is the target's or follows from {ROPE}")
            continue
        plain = plain.replace("layers.0.", "midlayer.", 1) if plain.startswith("layers.0.") else plain
        if plain in own:
            raise ValueError(f"{folder}: {name}: there are two tensors of this name, with and without a prefix; {ELSEWHERE}")
        own[plain] = tensor
    biases = [name for name in own if name.endswith(".bias")]
    if biases:
        raise ValueError(f"{folder}: {', '.join(biases)}: our layer has no biases; take another draft")
    return own


def _check_embeddings(found: Tensor | None, embeddings: Callable[[], Tensor], folder: Path) -> None:
    """Raise ValueError for embeddings other than the target's, but for the rounding of their type."""
    if found is None:
        return
    target = embeddings()
    same = found.shape == target.shape and (
        torch.equal(target.to(found.dtype), found) or torch.equal(found.to(target.dtype), target)
    )
    if not same:
        differing = "shapes" if found.shape != target.shape else f"{int((found != target).any(1).sum())} of its rows"
        raise ValueError(
            f"{folder}: {EMBEDDINGS}: differs from the target's in {differing}; our drafts share the target's embeddings. Give "
            "the target that the draft was trained for; a draft that trained embeddings of its own cannot be represented"
        )
    log(f"{folder}: {EMBEDDINGS}: left out, it is the target's own")


def _vocabulary(
    state: dict[str, Tensor], fields: Fields, tokens: int, folder: Path
) -> tuple[int | None, tuple[int, ...] | None]:
    """How many tokens the draft proposes, and which; None and None: all. Both of the vocabulary's tensors leave `state`."""
    if HEAD not in state:
        raise ValueError(f"{folder}: {HEAD}: is missing; a draft that takes the target's head cannot be represented")
    proposed, told = len(state[HEAD]), fields.top.get("draft_vocab_size")
    if told not in (None, proposed):
        raise ValueError(f"{fields.file}: draft_vocab_size: is {told}, {HEAD} has {proposed} rows; {ELSEWHERE}")
    own = {name: state.pop(name) for name in (D2T, T2D) if name in state}
    if proposed == tokens:
        if D2T in own and bool(own[D2T].any()):
            raise ValueError(f"{folder}: {D2T}: moves tokens, though all {tokens} are proposed; {ELSEWHERE}")
        return None, None
    if D2T not in own:
        raise ValueError(f"{folder}: {D2T}: is missing, {HEAD} has {proposed} of the target's {tokens} tokens; {ELSEWHERE}")
    own[D2T] = own[D2T].to(torch.int64)
    if T2D not in own:  # which engines do not read
        ids_V = own[D2T] + torch.arange(len(own[D2T]))
        own[T2D] = torch.zeros(tokens, dtype=torch.bool)
        own[T2D][ids_V[(ids_V >= 0) & (ids_V < tokens)]] = True
    own[T2D] = own[T2D].to(torch.bool)
    return proposed, ids_of(own, proposed, tokens, folder, ELSEWHERE)


def _layers(fields: Fields, target_layers: int, given: tuple[int, ...] | None) -> tuple[int, ...]:
    """The auxiliary layers, counted by their inputs. Raises ValueError for others than three ascending ones of the target's."""
    inputs, outputs = fields.layers()
    if inputs is not None and given not in (None, inputs):
        raise ValueError(f"--layers: {list(given or ())}: {fields.file} says {list(inputs)}; leave it out")
    chosen = given or inputs
    if chosen is None and outputs is not None:
        chosen = tuple(layer + 1 for layer in outputs)
        log(
            f"{fields.file}: eagle_config.eagle_aux_hidden_state_layer_ids: taken for outputs, as SGLang does: inputs of "
            f"layers {list(chosen)}. vLLM takes them for inputs; where the draft was trained so, give --layers "
            f"{' '.join(map(str, outputs))}"
        )
    if chosen is None:
        chosen = layers_of(None, target_layers)
        log(f"{fields.file}: eagle_aux_hidden_state_layer_ids: missing; engines' default {list(chosen)} is taken")
    if len(chosen) != AUXILIARY or list(chosen) != sorted({each for each in chosen if 0 <= each < target_layers}):
        raise ValueError(
            f"{fields.file}: eagle_aux_hidden_state_layer_ids: {list(chosen)}: must be {AUXILIARY} of the target's layers 0 to "
            f"{target_layers - 1}, ascending; {ELSEWHERE}"
        )
    return chosen


def _shape(layer: LlamaConfig, target: Any, file: Path) -> dict[str, Any]:
    """The parts of the layer's shape that are not the target's."""
    rope = {name: value for name, value in layer.rope_parameters.items() if name != "type" and value is not None}
    if rope["rope_type"] == "yarn":  # else stretched by however many positions the target has
        rope.setdefault("original_max_position_embeddings", layer.max_position_embeddings)
    own = {name: getattr(layer, name) for name in SHAPE} | {ROPE: rope}
    check_values(own, str(file), ELSEWHERE)
    check_shape(own, str(file))
    default = layer_config(target, Settings())
    beside = {name: getattr(default, name) for name in SHAPE if name != "head_dim"} | {"head_dim": head_width(target)}
    beside[ROPE] = {name: value for name, value in dict(target.rope_parameters).items() if value is not None}
    return {name: value for name, value in own.items() if value != beside[name]}
