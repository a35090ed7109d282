"""Share what EAGLE-3-like and block drafts have alike: layers of their own that read the target's hidden states.

Shapes: B rows, S tokens, N tokens whose next one is trained, H hidden width, R the part of a head that is rotated, V draft
vocabulary.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from longspec.draft_vocabulary import check_size
from longspec.methods.contract import DraftTrainer, Method, check_inputs, check_rising
from longspec.methods.layer_config import layer_config, turns_otherwise
from longspec.methods.layer_shape import LayerSettings
from longspec.methods.vocabulary_tensors import check_vocabulary, check_with_vocabulary, draft_settings, with_vocabulary
from longspec.models.draft_attention import Rotation, rotations
from longspec.models.draft_head import DraftHead
from longspec.models.teachers import DenseTeacher, Teacher
from longspec.states.forward import TargetStates
from longspec.states.tensors import BEST_TOKEN, COS, FINAL, HIDDEN, SIN, StateTensor, sparse_teacher

Rope = tuple[Tensor, Tensor]  # (cos, sin), [B, S, R] each


class OwnLayers(nn.Module):
    """The trainable module, of a norm before the head and of a head, None where the target's is asked.

    `ids_V`, no part of its state dict, are the target's tokens that its own head proposes; None where it has no head, and where
    the draft vocabulary was not read: such a module is for names and shapes alone. rotation: of layers that do not turn as the
    target does; None: the target's rotations are handed to them.
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
        """Make an untrained module's norm and head copies of the target's."""
        with states.gather([states.head_weight, states.final_norm_weight]), torch.no_grad():
            self.norm.weight.copy_(states.final_norm_weight)
            if self.lm_head is not None:
                assert self.ids_V is not None, "check_vocabulary has looked"
                self.lm_head.weight.copy_(states.head_weight[self.ids_V.to(states.head_weight.device)])

    def rope(self, target: Any, like: Tensor, positions_BS: Tensor) -> Rope:
        """Rotations of these positions, in the dtype and on the device of `like`."""
        return rotations(target.model, like, positions_BS) if self.rotation is None else self.rotation(like, positions_BS)


class OwnLayersTrainer(DraftTrainer):
    """A frozen target and its trainable draft. reads: Method.reads."""

    states: TargetStates
    reads: Callable[..., tuple[StateTensor, ...]]

    def __init__(self, states: TargetStates, draft_model: OwnLayers, settings: Any) -> None:
        super().__init__(states, draft_model)
        self.settings, self.layers = settings, settings.read_of(states.config.num_hidden_layers)

    def look(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None,
        document_ids: Tensor | None,
        row_numbers: Tensor | None,
        num_labels: int | None,
        with_llm_loss: bool,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return positions [B, S], and what is read of the target. Raises ValueError that names what is out of range."""
        position_ids = check_inputs(self.states.config, input_ids, labels, position_ids, document_ids, num_labels)
        check_rising(position_ids, labels, document_ids)
        names = [tensor.name for tensor in self.reads(self.states.config, self.settings, with_llm_loss=with_llm_loss)]
        return position_ids, self.states(input_ids, position_ids, document_ids, names, row_numbers)

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
        """Return the target's side of the loss of these of the B * S tokens; None where nothing was read for it."""

        def labelled(x_BS: Tensor) -> Tensor:
            return x_BS.flatten(0, 1)[tokens_N]

        if (sparse := sparse_teacher(found, labelled, ids_V, with_loss=with_loss)) is not None or FINAL not in found:
            return sparse
        best_N = labelled(found[BEST_TOKEN]) if BEST_TOKEN in found else None
        return DenseTeacher(labelled(found[FINAL]), self.states.head_weight, labels_N, ids_V, with_loss, best_N)


class OwnLayersMethod(Method):
    """Answer the contract (methods/contract.py) where such methods answer alike.

    schema: the method's Settings; trained_by: its trainer; layer: its module. hints: what else may be at fault in a file, by a
    part of the name of a tensor that is missing or unknown.
    """

    schema: type[LayerSettings]
    trained_by: type[OwnLayersTrainer]
    layer: type[OwnLayers]
    hints: ClassVar[Mapping[str, str]] = {}

    def reads(self, config: Any, settings: Any, *, with_llm_loss: bool) -> tuple[StateTensor, ...]:
        return self.trained_by.reads(config, settings, with_llm_loss=with_llm_loss)

    def stored_settings(self, path: Path) -> Any:
        return draft_settings(path, self.name, self.schema)

    def check_state(self, layer: nn.Module, state: dict[str, Tensor], source: object) -> None:
        """Raise ValueError as of check_with_vocabulary."""
        check_with_vocabulary(layer, state, source, self.hints)

    def published(self, state: dict[str, Tensor], settings: Any) -> dict[str, Tensor]:
        """Return the layer's own names, and the draft vocabulary's tensors."""
        return with_vocabulary(state, settings)

    def each_step(self, settings: Any) -> dict[str, Any]:
        """Ask for each step by itself; every forward makes them all."""
        return {"each_step": True}

    def trainer(self, states: TargetStates, settings: Any, weights: Path | None) -> DraftTrainer:
        """Return the draft beside a target, fresh or from a draft folder or weight file.

        Raises ValueError that names both values for a vocabulary, a target or a draft that does not fit.
        """
        check_vocabulary(settings)
        tokens = states.config.vocab_size
        check_size("--vocabulary", settings.target_vocabulary or tokens, tokens, "this target")
        layer = self.layer(states.config, settings).to(states.head_weight.dtype)
        layer.begin(states, settings)
        if weights is not None:
            self.load(layer, weights, states.config, settings)
        return self.trained_by(states, layer, settings)
