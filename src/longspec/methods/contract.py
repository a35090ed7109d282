"""The interface of a draft method. Each folder here has three modules that implement it:

    settings.py   read where there is no torch, when a run is planned: what a recipe may say of the method
        Method, Draft         dataclasses of recipe.method, whose `name` is the folder's, and of recipe.draft, the variant
        of(recipe, vocabulary) the settings that METHOD is asked with; a DraftVocabulary is passed only to a method whose
                              `Method` has the fields `vocabulary` and `vocabulary_from`
        check(recipe)         raises ValueError, with the key, for an invalid value and for states that cannot be stored
        fits(recipe, layers, vocabulary) raises ValueError, with the key, if a target of so many layers and tokens does not fit
        stored(recipe)        part of a folder's name: the tensors stored for this draft, and with recipe.states.top_k the
                              temperature of its labels
        told(recipe)          rows of a report: the recipe's keys that each covers, a title, the value as it acts
        COUNTS                what DraftOutput.counts may hold, with the titles of a report
        soft_labels(recipe)   whether the target's distribution is learnt, and not the text's tokens alone
        loss_weight(recipe)   the sum of a token's weights over all steps of the training loss; the loss divided by it is in
                              nats per token; None: the loss is no such sum
        TARGETS               model type -> published class; empty if none was published
        SAME                  section of the recipe, and its keys that must equal the draft's: with other values, layers of the
                              same shapes compute other numbers
        FAMILIES              model types of the targets that it drafts for, of longspec.families.FAMILIES
        WHY_THESE             what it needs of a target that the other families lack; empty if it takes all
        NAMELESS_FILES        whether weight files without a configuration belong to this method
        check_layout(layout, method, context) raises ValueError, with the key, for values of recipe.method that a layout of
                              another program cannot represent with texts of `context` tokens, None: any length; optional
        SERVED                engine -> longspec.engines.Served, for each engine that loads drafts of this method
        implied(tokens)       keys of recipe.method that follow from a target of so many tokens; optional
        longest_chain(recipe) the most tokens of a draft; optional
    method.py     METHOD, an object of a class that inherits from Method below, which does what most methods do
    drafter.py    read when texts are decoded: drafter(target, layer, settings, vocabulary) returns the Drafter that decodes
                  with a layer and its target; vocabulary: the tokens to propose, which decoding may choose if the settings
                  hold none (methods.drafter)
    card.md.j2    what a draft's model card says of the method: a part of draft/card.md.j2

A further module NAME_layout.py is a layout of its draft folders for another program. `longspec export --layout NAME` writes it,
and so does an evaluation by an engine that is SERVED with it. It has exported(folder) -> config.json, if the program reads the
folder's own tensors. Otherwise it has write(folder, out, dtype, context), which makes the file or folder `out`; dtype: of the
weights, None: the layout's choice; context: tokens of the longest text, None: no limit. Both raise ValueError, with the
recipe's key, for what the program cannot represent.

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
    """Hold the losses of one forward; [steps] each if the steps of drafting are measured one by one.

    loss: divided by the given number of labels, with the draft's gradient. llm_loss: the target's own cross entropy on the same
    tokens. agreement: share of these at which draft and target prefer the same next token. Both are None if not measured.
    counts: the method's other counts, by the names of a step's metrics; every forward of a training has the same names, and
    their values are summed over the global batch. reached, inside: of steps measured one by one, the number of tokens that
    agreement and loss are means over; None: all labels.
    """

    loss: Tensor
    llm_loss: Tensor | None
    agreement: Tensor | None
    counts: dict[str, Tensor] = field(default_factory=dict)
    reached: Tensor | None = None
    inside: Tensor | None = None


@dataclass(frozen=True)
class DraftMemory:
    """Hold the bytes that the draft's forward and backward need for some tokens, without weights and the target's states.

    kept: from the forward until the backward; losses: while the losses are computed; backward: at its widest. The last two
    are never alive together.
    """

    kept: int
    losses: int
    backward: int


@dataclass(frozen=True)
class Distribution:
    """Describe the probabilities a draft learns: the softmax of the target's logits of `ids`, divided by `temperature`."""

    ids: tuple[int, ...] | None  # the draft vocabulary, ascending; None: all tokens
    temperature: float


class DraftTrainer(nn.Module):
    """Train the draft next to its target. The target is no registered module, so that no engine shards or saves it.

    The parameters are those of `draft_model`, and the state dict holds `draft_model.*` alone. Checkpoints keep exactly what is
    trained, so a layer's state dict holds nothing else: the ids of a draft vocabulary belong to the settings, and to the layer
    as a buffer that is not persistent.

    forward(input_ids, labels, position_ids, document_ids, row_numbers, num_labels, with_llm_loss, **draws) returns the
    DraftOutput of a micro batch, int64 [B, S]. Labels of -100 are not trained; the loss is divided by `num_labels`;
    document_ids: of packed rows; row_numbers [B]: in the packed data; with_llm_loss False: the target's own loss is not
    wanted; draws: from Method.draws, Method.each_step or Method.heaviest.
    """

    draft_model: nn.Module
    states: Any  # states.forward.TargetStates, or a reader of stored states

    def __init__(self, states: Any, draft_model: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "states", states)
        self.draft_model = draft_model

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move the target, which is not registered, with the draft to its device; the target's dtype stays."""
        super()._apply(fn, recurse)
        self.states.follow(next(self.draft_model.parameters()).device)
        return self


def positions_of(input_ids_BS: Tensor, position_ids_BS: Tensor | None) -> Tensor:
    """Return the given positions [B, S]; for None, 0 to S - 1 in each row."""
    if position_ids_BS is not None:
        return position_ids_BS
    return torch.arange(input_ids_BS.shape[1], device=input_ids_BS.device).expand_as(input_ids_BS)


class Method(Protocol):
    """Define a draft method. settings: what its settings module makes of a recipe; config: the target's configuration."""

    name: str

    def reads(self, config: Any, settings: Any, *, with_llm_loss: bool) -> tuple[str, ...]:
        """Return names (states/tensors.py) of the target's tensors a training forward reads, except embeddings and rotations.

        If `learnt` is not None, the states may provide the likeliest tokens instead of `final`.
        """

    def learnt(self, settings: Any) -> Distribution | None:
        """Return the target's distribution if `final` is read for it alone; None: `final` is not read, or also for others."""

    def layer(self, config: Any, settings: Any) -> nn.Module:
        """Return the module to train, with fresh weights; build it on the meta device for names and shapes alone."""

    def trainer(self, states: Any, settings: Any, weights: Path | None) -> Any:
        """Return a DraftTrainer over loaded states; the draft is fresh or read from a draft folder or weight file.

        Parts of a fresh layer may start as copies of the target's. Raises ValueError if the weights do not fit.
        """

    def draws(
        self, settings: Any, seed: int, step: int, rows: Sequence[tuple[int, np.ndarray]], target_positions: int
    ) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Draw a micro batch's random values for a 0-based step: positions of each row, and further arguments of the forward.

        rows: (number in the data, plain positions). The values depend on (seed, step, row number) alone, never on the rank.
        """
        return [plain_S for _, plain_S in rows], {}

    def drafted_steps(self, settings: Any) -> int:
        """Return the length in tokens of the longest chain that training unrolls."""

    def each_step(self, settings: Any) -> dict[str, Any]:
        """Return the arguments of a forward that measures each of these steps; its losses are [steps]."""

    def heaviest(self, settings: Any) -> dict[str, Any]:
        """Return the arguments of the forward that needs the most memory."""
        return {}

    def memory(
        self, config: Any, settings: Any, tokens: int, dtype: torch.dtype, device: torch.device, *, top_k: int | None = None
    ) -> DraftMemory:
        """Return the memory of a micro batch of `tokens` tokens; top_k: states hold this many tokens instead of `final`."""

    def operations(
        self, config: Any, settings: Any, tokens: int, documents: Iterable[int], labels: int, *, with_teacher: bool
    ) -> tuple[float, float]:
        """Return floating-point operations of the layer's forward and backward, and of the products with the head.

        tokens: in all rows; documents: their lengths; labels: trained tokens; with_teacher: the target's logits are made from
        `final`.
        """

    def published(self, state: dict[str, Tensor], settings: Any) -> dict[str, Tensor]:
        """Return a layer's state dict as a draft folder stores it, plus the tensors that other readers expect."""
        return state

    def config_fields(self, config: Any, settings: Any) -> dict[str, Any]:
        """Return further fields of a draft folder's config.json, from which other readers know the draft.

        Values below `settings` replace the stored settings of these names, so that what the target decides is written out.
        """
        return {}

    def check_state(self, layer: nn.Module, state: dict[str, Tensor], source: object) -> None:
        """Raise ValueError as weight_files.check_state does.

        A layer on the meta device is checked against a checkpoint; others against a draft folder's file, which may hold more.
        """
        check_state(layer, state, source)

    def check_same(self, path: Path, config: Any, settings: Any, stored: Any, advice: str) -> None:
        """Raise ValueError, with the recipe's keys and both values, if a layer of `settings` differs from one of `stored`."""
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
        """Fill a layer from a draft folder or weight file, to decode with it and the target of `config`.

        Raises ValueError as check_state does, for another method's folder, for a damaged file, and, with the recipe's key and
        both values, if a layer of the same shapes would compute other numbers. A file of weights alone cannot be checked so.
        """
        check_draft_config(path, config)
        if read_draft_config(path, self.name) is not None:
            self.check_same(path, config, settings, self.stored_settings(path), "give one that fits, or its own recipe")
        file = draft_weights_file(path)
        fill(layer, read_tensors(file), file, self.check_state)

    def stored_settings(self, path: Path) -> Any:
        """Return the settings of a draft folder, or of published weight files. Raises ValueError if a setting is not valid."""
