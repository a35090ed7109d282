"""The interface of a draft method. Each folder here has three modules that implement it:

    settings.py   read where there is no torch, when a run is planned: what a recipe may say of the method
        Method, Draft         dataclasses of recipe.method, whose `name` is the folder's, and of recipe.draft, the variant
        of(recipe, vocabulary) the settings that METHOD is asked with; only a method whose `Method` has the fields `vocabulary`
                              and `vocabulary_from` is handed a DraftVocabulary
        check(recipe)         raises ValueError with the key for a value that is none, and for states that cannot be stored
        fits(recipe, layers, vocabulary) raises ValueError with the key for a target of so many layers and tokens that is none
        stored(recipe)        a word of a folder's name for the tensors that are stored for this draft, and with
                              recipe.states.top_k for the temperature at which its labels are taken
        told(recipe)          rows of a report: the recipe's keys that each covers, a title, the value as it acts
        COUNTS                what DraftOutput.counts may hold, with the titles of a report
        soft_labels(recipe)   whether the target's distribution is learnt, and not the text's tokens alone
        loss_weight(recipe)   the sum of the weights with which a token's losses of all steps are added up in the training loss,
                              which divided by it is in nats a token; None where the loss is no such sum
        TARGETS               model type -> published class; empty where none was published
        SAME                  section of the recipe, and its keys that a draft's weights fit alone: layers of the same shapes
                              compute other numbers by other values
        FAMILIES              model types of the targets that it drafts for, of longspec.families.FAMILIES
        WHY_THESE             what it asks of a target that the other families have not; empty where it takes all
        NAMELESS_FILES        whether weight files without a configuration are of this method
        check_layout(layout, method, context) raises ValueError, with the key, for values of recipe.method that a layout for
                              another program cannot represent beside texts of `context` tokens, None: of any length; only a
                              method with such values has it
        SERVED                how each engine that loads drafts of this method does: engine -> longspec.engines.Served
        implied(tokens)       keys of recipe.method that follow from a target of so many tokens; only a method with such has it
        longest_chain(recipe) how many tokens a draft can have at most; only a method whose drafts have such a limit has it
    method.py     METHOD, an object of a class that inherits from Method below, which does what most methods do
    drafter.py    read where texts are decoded: drafter(target, layer, settings, vocabulary) gives the Drafter that decodes with
                  a layer beside its target; vocabulary: the tokens to propose, which decoding may choose where the settings
                  hold none (methods.drafter)
    card.md.j2    what a draft's model card says of the method: a part of draft/card.md.j2

A further module NAME_layout.py is a layout of its draft folders for another program, which `longspec export --layout NAME`
and an evaluation by an engine that is SERVED so write. Either exported(folder) gives a config.json, where the program reads
the folder's own tensors. Or write(folder, out, dtype, context) makes the file or folder `out` itself: of weights in this dtype,
None: the layout's choice, for texts of at most `context` tokens, None: of any length. It raises ValueError, with the recipe's
key, for what the program cannot represent.

A further module published.py reads drafts that others published: read_published(folder, config, target's configuration, a
function that reads the target's embeddings) -> (state dict of the layer, settings). It raises ValueError with file, key and
both values for what we cannot represent. settings.py then has PUBLISHED too, a part of the architectures' names in config.json.

Shapes: B rows, S tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from longspec import methods
from longspec.methods.draft_files import check_draft_config, draft_weights_file, read_draft_config
from longspec.models.weight_files import check_state, fill, read_tensors


@dataclass
class DraftOutput:
    """Losses of one forward; [steps] each where the steps of drafting were asked for one by one.

    loss: the share of the given number of labels, with the draft's gradient. llm_loss: the target's own cross entropy on the
    same tokens. agreement: share of the tokens at which draft and target prefer the same next token. Both are None where
    they are not measured. counts: whatever else the method counts, by the names that a step's metrics get, the same ones
    in every forward of a training; they are added up over the global batch. reached, inside: of steps asked for one by one, the
    tokens that the agreement and the loss are means over; None: all labels.
    """

    loss: Tensor
    llm_loss: Tensor | None
    agreement: Tensor | None
    counts: dict[str, Tensor] = field(default_factory=dict)
    reached: Tensor | None = None
    inside: Tensor | None = None


@dataclass(frozen=True)
class DraftMemory:
    """Bytes that the draft's forward and backward hold for some tokens, beside weights and what is kept of the target.

    kept: for the backward, from the forward on; losses: while the losses are taken; backward: in its widest part. The last
    two are never alive together.
    """

    kept: int
    losses: int
    backward: int


@dataclass(frozen=True)
class Distribution:
    """Probabilities that a draft learns: the softmax of the target's logits of `ids`, divided by `temperature`."""

    ids: tuple[int, ...] | None  # of the draft vocabulary, ascending; None: all tokens
    temperature: float


class DraftTrainer(nn.Module):
    """The module that is trained, with the target out of its registered modules, so that no engine shards or saves it.

    Its parameters are those of `draft_model`, and its state dict holds `draft_model.*` alone. Checkpoints keep what is trained
    and nothing else, so a layer's state dict is exactly that: ids of a draft vocabulary, say, belong to the settings, and to
    the layer as a buffer that is not persistent.

    forward(input_ids, labels, position_ids, document_ids, row_numbers, num_labels, with_llm_loss, **draws) returns DraftOutput
    of a micro batch, int64 [B, S]. labels of -100 are not trained; the loss is divided by `num_labels`; document_ids of packed
    rows; row_numbers [B] in the packed data; with_llm_loss False: the target's own loss is not wanted; draws: as of
    Method.draws, Method.each_step or Method.heaviest.
    """

    draft_model: nn.Module
    states: Any  # states.forward.TargetStates, or what reads stored ones

    def __init__(self, states: Any, draft_model: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "states", states)
        self.draft_model = draft_model

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """The target, which is not registered, follows the draft to its device; its dtype stays."""
        super()._apply(fn, recurse)
        self.states.follow(next(self.draft_model.parameters()).device)
        return self


def positions_of(input_ids_BS: Tensor, position_ids_BS: Tensor | None) -> Tensor:
    """Return the positions that are given, plain ones for None."""
    if position_ids_BS is not None:
        return position_ids_BS
    return torch.arange(input_ids_BS.shape[1], device=input_ids_BS.device).expand_as(input_ids_BS)


class Method(Protocol):
    """A draft method. `settings` is what its settings module makes of a recipe; `config` is the target's configuration."""

    name: str

    def reads(self, config: Any, settings: Any, *, with_llm_loss: bool) -> tuple[str, ...]:
        """The names (states/tensors.py) of the target's tensors that a training forward reads, beside embeddings and rotations.

        Where `learnt` is not None, the states may hand out the likeliest tokens in the place of `final`.
        """

    def learnt(self, settings: Any) -> Distribution | None:
        """The distribution of the target for which alone `final` is read; None: it is not read, or for other things too."""

    def layer(self, config: Any, settings: Any) -> nn.Module:
        """The module that is trained, with fresh weights; on the meta device for its names and shapes alone."""

    def trainer(self, states: Any, settings: Any, weights: Path | None) -> Any:
        """A DraftTrainer beside loaded states, fresh or from a draft folder or weight file.

        Parts of a fresh layer may start as copies of the target's. Raises ValueError for weights that do not fit.
        """

    def draws(
        self, settings: Any, seed: int, step: int, rows: Sequence[tuple[int, np.ndarray]], target_positions: int
    ) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Random draws of one micro batch in a 0-based step: positions of each row, and further arguments of the forward.

        rows: (number in the data, plain positions). A function of (seed, step, row number) alone, never of a rank.
        """
        return [plain_S for _, plain_S in rows], {}

    def drafted_steps(self, settings: Any) -> int:
        """The length in tokens of the longest chain that training unrolls."""

    def each_step(self, settings: Any) -> dict[str, Any]:
        """Arguments of a forward that measures each of these steps; its losses are [steps]."""

    def heaviest(self, settings: Any) -> dict[str, Any]:
        """Arguments of the forward that takes most memory."""
        return {}

    def memory(
        self, config: Any, settings: Any, tokens: int, dtype: torch.dtype, device: torch.device, *, top_k: int | None = None
    ) -> DraftMemory:
        """Memory of a micro batch of so many tokens; top_k: so many likeliest tokens take the place of `final`."""

    def operations(
        self, config: Any, settings: Any, tokens: int, documents: Iterable[int], labels: int, *, with_teacher: bool
    ) -> tuple[float, float]:
        """Floating-point operations of so many tokens in documents of these lengths, of which `labels` are trained.

        They are those of the layer's forward and backward, and those of the products with the head. with_teacher: the logits of
        the target are made, of `final`.
        """

    def published(self, state: dict[str, Tensor], settings: Any) -> dict[str, Tensor]:
        """A layer's state dict as a draft folder holds it, with what else other readers expect beside it."""
        return state

    def config_fields(self, config: Any, settings: Any) -> dict[str, Any]:
        """Further fields of a draft folder's config.json, by which other readers know the draft.

        Those below `settings` replace the stored settings of their names: what the target decides is written out.
        """
        return {}

    def check_state(self, layer: nn.Module, state: dict[str, Tensor], source: object) -> None:
        """Raise ValueError as of weight_files.check_state.

        A layer without numbers is held against a checkpoint, another one against a draft folder's file, which may say more.
        """
        check_state(layer, state, source)

    def check_same(self, path: Path, config: Any, settings: Any, stored: Any, advice: str) -> None:
        """Raise ValueError, with the recipe's keys and both values, where a layer of `settings` is not the one of `stored`."""
        written = self.config_fields(config, settings).get("settings", {})
        own = replace(settings, **{name: tuple(x) if isinstance(x, list) else x for name, x in written.items()})
        section, names = methods.settings_of(self.name).SAME
        wrong = [
            f"{section}.{name}: this run has {getattr(own, name)!r}, the draft was trained with {getattr(stored, name)!r}"
            for name in names
            if getattr(own, name) != getattr(stored, name)
        ]
        if wrong:
            raise ValueError(f"{path}: not the weights of this draft: {'; '.join(wrong)}; {advice}")

    def load(self, layer: nn.Module, path: Path, config: Any, settings: Any) -> None:
        """Fill a layer from a draft folder or weight file, with which it is decoded beside the target of `config`.

        Raises ValueError as of check_state, for another method's folder, for a damaged file, and, with the recipe's key and
        both values, where a layer of the same shapes would compute other numbers; weights alone say nothing of themselves.
        """
        check_draft_config(path, config)
        if read_draft_config(path, self.name) is not None:
            self.check_same(path, config, settings, self.stored_settings(path), "give one that fits, or its own recipe")
        file = draft_weights_file(path)
        fill(layer, read_tensors(file), file, self.check_state)

    def stored_settings(self, path: Path) -> Any:
        """The settings of a draft folder, or those of published weight files. Raises ValueError for strange ones."""
