"""Share code of EAGLE-3-like and block drafts: their own layers read the target's hidden states.

Shapes: B rows, S tokens, N tokens whose next one is trained, H hidden width, R the part of a head that is rotated, V draft
vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from longspec.config.schema import HARD
from longspec.methods.contract import Distribution, DraftOutput, DraftTrainer, Method, positions_of
from longspec.methods.draft_files import AGAIN, draft_weights_file, read_draft_config, stored_settings
from longspec.methods.layer_config import layer_config, turns_otherwise
from longspec.methods.layer_shape import LayerSettings
from longspec.methods.vocabulary_tensors import D2T, T2D, ids_of, vocabulary_tensors
from longspec.models.draft_attention import Rotation, rotations
from longspec.models.losses import StepSums
from longspec.models.teachers import Teacher
from longspec.models.weight_files import check_state, read_tensors
from longspec.states.forward import TargetStates
from longspec.states.tensors import COS, FINAL, HIDDEN, SIN, teacher_of

Rope = tuple[Tensor, Tensor]  # (cos, sin), [B, S, R] each


def reads(config: Any, settings: Any, *, with_llm_loss: bool) -> tuple[str, ...]:
    """Return names of the inputs of all stored layers or those read; `final` too for soft labels and the target's own loss."""
    layers = getattr(settings, "stored_layers", None) or settings.read_of(config.num_hidden_layers)
    final = (FINAL,) if settings.loss != HARD or with_llm_loss else ()
    return (*(f"{HIDDEN}{layer}" for layer in layers), *final)


class DraftHead(nn.Linear):
    """Compute a draft's own head. Engines may gather its weight only within forward, so losses over it are computed there."""

    def forward(self, hidden: Any, take: Callable[[Tensor, Any], Any] | None = None) -> Any:
        """Return logits of hidden states [..., H]; with `take`, the tuple of tensors it makes of weight and hidden states."""
        return super().forward(hidden) if take is None else take(self.weight, hidden)


class OwnLayers(nn.Module):
    """Hold the trainable module's norm before the head and its head, None if the target's head is used.

    `ids_V`, not in the state dict: the target's tokens that its own head proposes; None if it has no head, or if the draft
    vocabulary was not read: such a module is for names and shapes alone. rotation: of layers that do not rotate as the target
    does; None: they get the target's rotations.
    """

    ids_V: Tensor | None
    rotation: Rotation | None
    norm: LlamaRMSNorm
    lm_head: DraftHead | None

    def __init__(self, config: Any, settings: LayerSettings) -> None:
        super().__init__()
        self.rotation = Rotation(layer_config(config, settings)) if turns_otherwise(config, settings) else None
        self.register_buffer("ids_V", None if settings.ids is None else torch.tensor(settings.ids), persistent=False)

    def begin(self, states: Any, settings: Any) -> None:
        """Copy the target's norm and head into an untrained module."""
        norm: nn.Parameter = states.target.model.norm.weight
        with states.gather([states.head_weight, norm]), torch.no_grad():
            self.norm.weight.copy_(norm)
            if self.lm_head is not None:
                assert self.ids_V is not None, "methods.vocabulary_for has read the file"
                self.lm_head.weight.copy_(states.head_weight[self.ids_V.to(states.head_weight.device)])

    def rope(self, target: Any, like: Tensor, positions_BS: Tensor) -> Rope:
        """Return rotations of these positions, in the dtype and on the device of `like`."""
        return rotations(target.model, like, positions_BS) if self.rotation is None else self.rotation(like, positions_BS)


class OwnLayersTrainer(DraftTrainer):
    """Train a draft next to a frozen target.

    measure: computes the sums of the losses, the number of trained tokens, the target's own loss (None if not wanted) and the
    method's counts, from the target's tensors, a forward's input_ids, labels, position_ids, document_ids and with_llm_loss,
    and its draws.
    """

    states: TargetStates
    measure: Callable[..., tuple[StepSums, int | Tensor, Tensor | None, dict[str, Tensor]]]

    def __init__(self, states: TargetStates, draft_model: OwnLayers, settings: Any) -> None:
        super().__init__(states, draft_model)
        self.settings, self.layers = settings, settings.read_of(states.config.num_hidden_layers)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        row_numbers: Tensor | None = None,
        num_labels: int | None = None,
        with_llm_loss: bool = True,
        each_step: bool = False,
        **draws: Tensor,
    ) -> DraftOutput:
        """Return the weighted loss of all steps, divided by `num_labels`, None = this call's own number of labels.

        position_ids rise by one inside a document. Steps are those of a chain, or slots of a block; the agreement is the first
        step's. each_step: loss, target's loss and agreement are [K], of each step alone, without its weight; means over the
        labels that the step predicts, for the loss over those it can propose. counts: `outside_vocabulary`, labels without a
        loss because the draft cannot propose the token, and those of `measure`.
        """
        position_ids = positions_of(input_ids, position_ids)
        names = reads(self.states.config, self.settings, with_llm_loss=with_llm_loss)
        found = self.states(input_ids, position_ids, document_ids, names, row_numbers)
        asked = (labels, position_ids, document_ids, with_llm_loss)
        sums, trained, llm_loss, counts = self.measure(found, input_ids, *asked, **draws)
        reached_K = sums.reached_K.clamp_min(1)
        counts |= {"outside_vocabulary": (sums.reached_K - sums.inside_K).sum()}
        agreement_K = None if sums.agreements_K is None else sums.agreements_K / reached_K
        if each_step:
            target_K = None if llm_loss is None or sums.target_K is None else sums.target_K / reached_K
            losses_K = sums.losses_K / sums.inside_K.clamp_min(1)
            return DraftOutput(losses_K, target_K, agreement_K, counts, sums.reached_K, sums.inside_K)
        count = max(1, int(trained)) if num_labels is None else num_labels
        return DraftOutput(sums.draft / count, llm_loss, None if agreement_K is None else agreement_K[0], counts)

    def taps(self, found: dict[str, Tensor]) -> list[Tensor]:
        """Return the hidden states [B, S, H] that the draft projects, in the order of their layers."""
        return [found[f"{HIDDEN}{number}"] for number in self.layers]

    def rope_of_text(self, found: dict[str, Tensor], like: Tensor, positions_BS: Tensor) -> Rope:
        """Return the draft's rotations of the text."""
        own: Any = self.draft_model.rotation
        return (found[COS], found[SIN]) if own is None else own(like, positions_BS)

    def teacher(
        self, found: dict[str, Tensor], tokens_N: Tensor, labels_N: Tensor, ids_V: Tensor | None, with_loss: bool
    ) -> Teacher | None:
        """Return the target's side of the loss of N of the B * S tokens; None if nothing was read for it."""
        head = self.states.head_weight
        return teacher_of(found, lambda x_BS: x_BS.flatten(0, 1)[tokens_N], head, labels_N, ids_V, with_loss=with_loss)


class OwnLayersMethod(Method):
    """Answer the contract (methods/contract.py) for methods with layers of their own.

    schema: the method's Settings; trained_by: its trainer; layer: its module. hints: part of a missing or unknown tensor's name
    -> what else may be wrong with a file.
    """

    schema: type[LayerSettings]
    trained_by: type[OwnLayersTrainer]
    layer: type[OwnLayers]
    hints: ClassVar[Mapping[str, str]] = {}
    reads = staticmethod(reads)

    def learnt(self, settings: Any) -> Distribution | None:
        """Return the distribution over the draft vocabulary for soft labels; its tokens are known if its file was read."""
        return Distribution(settings.ids, 1.0) if settings.loss != HARD else None

    def stored_settings(self, path: Path) -> Any:
        """Return a draft folder's settings, with tokens from d2t. Raises ValueError with file, key and both values."""
        found, settings = read_draft_config(path, self.name), stored_settings(path, self.schema)
        if found is None or settings is None:
            raise ValueError(f"{path}: has no draft's config.json beside it, which tells its settings; give a draft folder")
        if settings.vocabulary is None:
            return settings
        tokens = found[1]["target"]["vocab_size"]
        ids = tuple(range(tokens))
        if settings.vocabulary != tokens:
            file = draft_weights_file(path)
            ids = ids_of(read_tensors(file, lambda key: key == D2T), settings.vocabulary, tokens, file, AGAIN)
        return replace(settings, ids=ids, target_vocabulary=tokens)

    def check_state(self, layer: nn.Module, state: dict[str, Tensor], source: object) -> None:
        """Raise ValueError as weight_files.check_state does, and if d2t or t2d is missing or of another draft vocabulary.

        A checkpoint has neither and is checked against a layer on the meta device.
        """
        weights = {name: tensor for name, tensor in state.items() if name not in (D2T, T2D)}
        strange = layer.state_dict().keys() ^ weights.keys()
        hint = "".join(told for name, told in self.hints.items() if name in str(strange))
        check_state(layer, weights, source, hint=hint)
        own_V: Any = layer.ids_V
        if own_V is None or own_V.is_meta:
            return
        own_V = own_V.cpu()
        proposes_first = torch.equal(own_V, torch.arange(len(own_V)))  # a file need not have d2t then
        if len(weights) == len(state) and proposes_first:
            return
        if not torch.equal(torch.tensor(ids_of(state, len(own_V), None, source, AGAIN)), own_V):
            raise ValueError(
                f"{source}: {D2T}: names other tokens than this draft's vocabulary; give a draft of the same vocabulary, or "
                "take its run's by recipe.method.vocabulary_from"
            )

    def published(self, state: dict[str, Tensor], settings: Any) -> dict[str, Tensor]:
        """Return the layer's tensors by their names, with d2t and t2d if the draft vocabulary is known and not all tokens."""
        if settings.ids is not None:
            state = state | vocabulary_tensors(settings.ids, settings.target_vocabulary)
        return dict(sorted(state.items()))

    def each_step(self, settings: Any) -> dict[str, Any]:
        """Return each_step: measure each step by itself; every forward computes them all."""
        return {"each_step": True}

    def trainer(self, states: TargetStates, settings: Any, weights: Path | None) -> DraftTrainer:
        """Return the draft next to a target, fresh or from a draft folder or weight file. Raises ValueError as load does."""
        layer = self.layer(states.config, settings).to(states.head_weight.dtype)
        layer.begin(states, settings)
        if weights is not None:
            self.load(layer, weights, states.config, settings)
        return self.trained_by(states, layer, settings)
