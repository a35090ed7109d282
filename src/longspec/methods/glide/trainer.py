"""Train GLIDE (LongSpec, arXiv 2502.17421, section 3): a draft layer next to a frozen target, and its loss.

Each family of targets has a class, called as `(config, target_model_path, glide_path=None, dtype=None)`.

Shapes: B batch, S tokens, H hidden width, K key/value heads, D head width.
"""

from dataclasses import fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PretrainedConfig

from longspec.config.schema import Model
from longspec.methods import draft_files
from longspec.methods.contract import DraftOutput, DraftTrainer, positions_of
from longspec.methods.glide.layer import GlideLayer, check_draft_state, fresh_layer
from longspec.methods.glide.settings import BLOCKS, RANDOM, Draft
from longspec.models.attention.backends import AUTO, check_backend
from longspec.models.attention.visibility import Visibility
from longspec.models.losses import NO_LABEL, linear_cross_entropy
from longspec.models.target import load_target, resolve_dtype
from longspec.models.target_config import read_target_config
from longspec.models.weight_files import fill, read_tensors
from longspec.states.forward import STATES_ATTENTION, TargetStates
from longspec.states.tensors import COS, EMBEDDED, FINAL, KEYS, SIN, VALUES, teacher_of

# The variant of published weights, which have no settings.
PUBLISHED = Draft(anchors="random", lag_mode="random", lag=4, loss="hard")
RECIPE_MODEL = {field.name for field in fields(Model)}


def reads(config: Any, settings: Draft, *, with_llm_loss: bool) -> tuple[str, ...]:
    """Return the target's last-layer keys and values; its final hidden states too for soft labels and the target's own loss."""
    last = config.num_hidden_layers - 1
    cached = (f"{KEYS}{last}", f"{VALUES}{last}")
    return cached if settings.loss == "hard" and not with_llm_loss else (*cached, FINAL)


def _lag_per_row(lag: int | Tensor | str | None, input_ids: Tensor) -> Tensor | None:
    """Return the lag as int64 [B], 1 if it is None; return None for blocks. Raises ValueError for others, and below 1."""
    batch = input_ids.shape[0]
    if isinstance(lag, str):
        if lag != BLOCKS:
            raise ValueError(f"lag: {lag!r} is unknown; give an int, a tensor [B] or {BLOCKS!r}")
        return None
    if not isinstance(lag, Tensor):
        lag = torch.full((batch,), 1 if lag is None else lag)
    if lag.dtype != torch.int64 or lag.shape != (batch,):
        raise ValueError(f"lag: must be int64 [{batch}], one for each row, is {lag.dtype} {list(lag.shape)}")
    if bool((lag < 1).any()):
        raise ValueError(f"lag: {int(lag.min())}: must be 1 or more: a draft never sees the target's key of its own token")
    return lag.to(input_ids.device)


class Glide(DraftTrainer):
    """Train a draft, `.draft_model`, next to a frozen target, `.model` and `.lm_head`."""

    families: ClassVar[tuple[str, ...]] = ()
    states: TargetStates
    draft_model: GlideLayer

    def __init__(
        self,
        config: PretrainedConfig,
        target_model_path: str,
        glide_path: str | None = None,
        dtype: torch.dtype | None = None,
        draft: Draft | None = None,
        states: TargetStates | None = None,
        attention: str = AUTO,
    ) -> None:
        """Load the target and make its draft.

        glide_path: a .pth, a .safetensors or a draft folder, None = a fresh draft; dtype: None = bfloat16 on a GPU that has
        it, else float32; draft: the variant, None = as in the draft's config.json, or else the published one; states: the
        target if it is loaded already; attention: backend of target and draft (models/attention), "auto" = the fastest
        available. Raises ValueError if target or draft does not fit.
        """
        if config.model_type not in self.families:
            raise ValueError(
                f"{target_model_path}: config.json: model_type {config.model_type!r} is not supported by "
                f"{type(self).__name__}, which takes {', '.join(self.families)}; choose another model _target_"
            )
        if glide_path is not None:
            draft_files.check_draft_config(glide_path, config)
        settings = draft or (glide_path and draft_files.stored_settings(glide_path, Draft)) or replace(PUBLISHED)
        if states is None:
            check_backend(attention)
            target = load_target(target_model_path, config, dtype or resolve_dtype("auto"), STATES_ATTENTION)
            states = TargetStates(target, attention=attention)
        super().__init__(states, fresh_layer(states, settings if glide_path is None else replace(settings, start=RANDOM)))
        self.config, self.draft_settings = config, settings
        if glide_path is not None:
            file = draft_files.draft_weights_file(glide_path)
            fill(self.draft_model, read_tensors(file), file, check_draft_state)

    @classmethod
    def from_pretrained(cls, target_model_path: str, state_dict: dict[str, Tensor] | None = None, **arguments: Any) -> "Glide":
        """Build from a target's folder or hub name, or from a draft folder and the target it names.

        state_dict: the draft's weights, names with or without the prefix `draft_model.`; arguments: of the constructor. Keys
        of a recipe's section `model` are accepted and ignored, so that Hydra may call this with that section. Raises
        ValueError, with the tensors' names, if weights do not fit.
        """
        if "ignore_mismatched_sizes" in arguments:
            raise ValueError("ignore_mismatched_sizes: weights that do not fit are always refused; leave it out")
        own = {name: value for name, value in arguments.items() if name not in RECIPE_MODEL}
        target_model_path, glide_path = draft_files.target_and_draft(target_model_path, own.pop("glide_path", None))
        glide = cls(read_target_config(target_model_path), target_model_path, glide_path, **own)
        if state_dict is not None:
            named = {name.removeprefix(draft_files.TRAINING_PREFIX): tensor for name, tensor in state_dict.items()}
            fill(glide.draft_model, named, "state_dict", check_draft_state)
        return glide

    @property
    def target(self) -> Any:
        """Return the frozen target, transformers' causal language model."""
        return self.states.target

    @property
    def model(self) -> Any:
        """Return the frozen target without its head."""
        return self.target.model

    @property
    def lm_head(self) -> Any:
        """Return the frozen target's head, shared by the draft."""
        return self.target.lm_head

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        lag: int | Tensor | str | tuple[int, ...] | None = None,
        document_ids: Tensor | None = None,
        num_labels: int | Tensor | None = None,
        with_llm_loss: bool = True,
        row_numbers: Tensor | None = None,
    ) -> DraftOutput:
        """Return the teacher-forced loss of the draft. The order of arguments is published.

        input_ids, labels int64 [B, S], -100 = not trained; position_ids [B, S], None = plain; lag: the number of the target's
        newest keys that a query does not see: None = 1, an int, int64 [B], "blocks", or a tuple of ints: the draft runs once
        for each, the target once for all; document_ids [B, S]: of packed rows; each document's last token is not trained;
        num_labels: the loss is divided by it, None = this call's number of labels; with_llm_loss: also measure the target's own
        loss; with hard labels and without it the target's forward ends after its last layer's keys and values; row_numbers
        [B]: of the rows in the packed data, to find stored states.
        """
        lags = [_lag_per_row(each, input_ids) for each in (lag if isinstance(lag, tuple) else (lag,))]
        position_ids = positions_of(input_ids, position_ids)
        wanted = reads(self.config, self.draft_settings, with_llm_loss=with_llm_loss)
        found = self.states(input_ids, position_ids, document_ids, wanted, row_numbers)
        rope, cached = (found[COS], found[SIN]), (found[wanted[0]], found[wanted[1]])
        next_labels = labels[:, 1:]
        if document_ids is not None:  # a document's last token does not predict the next document's first
            next_labels = next_labels.masked_fill(document_ids[:, 1:] != document_ids[:, :-1], NO_LABEL)
        outputs, blocks = [], self.draft_settings.block
        for lag_B in lags:
            hidden_BSH = self.draft_model(
                found[EMBEDDED],
                rope,
                self.draft_model.own_keys_values(found[EMBEDDED], rope),
                cached,
                Visibility(window=self.draft_settings.window, document_ids_BT=document_ids),
                Visibility(lag_B=lag_B, lag_blocks=blocks if lag_B is None else None, document_ids_BT=document_ids),
                self.states.attention,
            )
            outputs.append(self._losses(hidden_BSH, found, next_labels, num_labels, with_llm_loss))
        if not isinstance(lag, tuple):
            return outputs[0]
        values = ([getattr(output, name) for output in outputs] for name in ("loss", "llm_loss", "agreement"))
        made: list[Any] = [None if of[0] is None else torch.stack(of) for of in values]
        return DraftOutput(*made)

    def _losses(
        self,
        hidden_BSH: Tensor,
        found: dict[str, Tensor],
        next_labels_BS: Tensor,
        num_labels: int | Tensor | None,
        with_llm_loss: bool,
    ) -> DraftOutput:
        """Compute the losses of the tokens whose next token is trained; labels [B, S - 1]."""
        trained_BS = next_labels_BS != NO_LABEL
        labels_N = next_labels_BS[trained_BS]
        count = max(1, len(labels_N))

        def labelled(x_BS: Tensor) -> Tensor:
            return x_BS[:, :-1][trained_BS]

        learnt: dict[str, Any] = {"with_loss": with_llm_loss, "temperature": self.draft_settings.temperature}
        head_weight = self.states.head_weight
        with self.states.gather([head_weight]):
            teacher = teacher_of(found, labelled, head_weight, labels_N, None, **learnt)
            sums = linear_cross_entropy(labelled(hidden_BSH), teacher, head_weight, labels_N, self.draft_settings.loss)
        draft, target, agreements = sums
        return DraftOutput(
            loss=draft / (count if num_labels is None else num_labels),
            llm_loss=target / count if target is not None and with_llm_loss else None,
            agreement=agreements / count if agreements is not None else None,
        )


class LlamaGlide(Glide):
    """Train GLIDE next to a Llama target."""

    families = ("llama",)


class MistralGlide(Glide):
    """Train GLIDE next to a Mistral target.

    The cross attention sees all of the target's keys, even if the target's own last layer has a sliding window.
    """

    families = ("mistral",)


class Qwen2Glide(Glide):
    """Train GLIDE next to a Qwen2 target (QwQ, Qwen2.5)."""

    families = ("qwen2",)


class Qwen3Glide(Glide):
    """Train GLIDE next to a Qwen3 target, dense or with experts.

    The target's keys have its own key norm applied. The draft has the published layer: no norms of queries and keys, and a
    dense MLP of the target's `intermediate_size`.
    """

    families = ("qwen3", "qwen3_moe")


CLASSES: tuple[type[Glide], ...] = (LlamaGlide, MistralGlide, Qwen2Glide, Qwen3Glide)


def class_for(model_type: str) -> type[Glide]:
    """Return the class for a target of this model type, one of longspec.families."""
    return next(cls for cls in CLASSES if model_type in cls.families)
