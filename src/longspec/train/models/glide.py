"""The GLIDE draft (LongSpec, arXiv 2502.17421, section 3): one decoder layer beside a frozen target.

Shapes: B batch, S tokens, H hidden width, N query heads, K key/value heads, D head width.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, rotate_half
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from longspec.config import Draft
from longspec.families import position_limit
from longspec.train.losses import linear_cross_entropy
from longspec.train.models.attention import AUTO, attend, check_backend
from longspec.train.models.inputs import NO_LABEL, check_ranges, check_shapes, lag_per_row
from longspec.train.models.precision import resolve_dtype
from longspec.train.models.target import head_width, load_target
from longspec.train.models.target_config import read_target_config
from longspec.train.models.target_states import STATES_ATTENTION, TargetStates
from longspec.train.models.visibility import Visibility
from longspec.train.models.visibility_tree import TreeVisibility
from longspec.train.models.weights import check_draft_config, draft_settings, load_draft_weights, target_and_draft

AnyVisibility = Visibility | TreeVisibility
BLOCKS = "blocks"
# The variant of published weights, which carry no settings.
PUBLISHED = Draft(anchors="random", lag_mode="random", lag=4, loss="hard")


def rotate(x_BNSD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary positions; `rope` is (cos, sin), each [B, S, D]."""
    cos_B1SD, sin_B1SD = rope[0][:, None], rope[1][:, None]
    return x_BNSD * cos_B1SD + rotate_half(x_BNSD) * sin_B1SD


class GlideAttention(nn.Module):
    """Projections of one attention; the cross attention has no keys and values of its own."""

    def __init__(self, config: PretrainedConfig, *, cross: bool) -> None:
        super().__init__()
        self.head_width = head_width(config)
        width, query_width = config.hidden_size, config.num_attention_heads * self.head_width
        self.q_proj = nn.Linear(width, query_width, bias=True)
        if not cross:
            key_width = config.num_key_value_heads * self.head_width
            self.k_proj = nn.Linear(width, key_width, bias=True)
            self.v_proj = nn.Linear(width, key_width, bias=True)
        self.o_proj = nn.Linear(query_width, width, bias=False)

    def heads(self, x_BSE: Tensor) -> Tensor:
        """Split the last axis into heads, [B, heads, S, D]."""
        return x_BSE.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def queries(self, x_BSH: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated queries [B, N, S, D]."""
        return rotate(self.heads(self.q_proj(x_BSH)), rope)

    def output(self, q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, visibility: AnyVisibility, backend: str) -> Tensor:
        """Attend and project back, [B, S, H]."""
        seen_BNSD = attend(q_BNSD, k_BKTD, v_BKTD, visibility, self.head_width**-0.5, backend)
        return self.o_proj(seen_BNSD.transpose(1, 2).flatten(2))


class GlideLayer(nn.Module):
    """The trainable layer. Its state dict has the published names, less the unused keys and values of `cross_attn`.

    With `final_norm` it ends in a norm of its own, `final_layernorm`, which no published draft has.
    """

    def __init__(self, config: PretrainedConfig, *, final_norm: bool = False) -> None:
        super().__init__()
        self.self_attn = GlideAttention(config, cross=False)
        self.cross_attn = GlideAttention(config, cross=True)
        self.mlp = Qwen2MLP(config)  # without biases, in both families
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_self_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_cross_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.final_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps) if final_norm else nn.Identity()
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def own_keys_values(self, embedded_BSH: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys (rotated) and values of the self attention, [B, K, S, D] each: a function of tokens and positions alone."""
        normed_BSH = self.input_layernorm(embedded_BSH)
        attention = self.self_attn
        keys_BKSD = rotate(attention.heads(attention.k_proj(normed_BSH)), rope)
        return keys_BKSD, attention.heads(attention.v_proj(normed_BSH))

    def forward(
        self,
        embedded_BSH: Tensor,
        rope: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor],
        target: tuple[Tensor, Tensor],
        own_visibility: AnyVisibility,
        target_visibility: AnyVisibility,
        attention: str = AUTO,
    ) -> Tensor:
        """Hidden states [B, S, H] for the target's head; `own` and `target` are (keys, values), [B, K, T, D] each."""
        q_BNSD = self.self_attn.queries(self.input_layernorm(embedded_BSH), rope)
        hidden_BSH = embedded_BSH + self.self_attn.output(q_BNSD, *own, own_visibility, attention)
        q_BNSD = self.cross_attn.queries(self.post_self_attention_layernorm(hidden_BSH), rope)
        hidden_BSH = hidden_BSH + self.cross_attn.output(q_BNSD, *target, target_visibility, attention)
        hidden_BSH = hidden_BSH + self.mlp(self.post_cross_attention_layernorm(hidden_BSH))
        return self.final_layernorm(hidden_BSH)


def fresh_layer(states: TargetStates, *, final_norm: bool) -> GlideLayer:
    """An untrained draft layer in the target's dtype. A final norm starts as the target's own, which the head expects."""
    target = states.target
    layer = GlideLayer(target.config, final_norm=final_norm).to(target.dtype)
    if final_norm:
        with states.gather([target.model.norm.weight]):
            layer.final_layernorm.load_state_dict({"weight": target.model.norm.weight})
    return layer


@dataclass
class GlideOutput:
    """Losses of one forward, [lags] where several lags were asked for. `loss` carries the draft's gradient."""

    loss: Tensor
    llm_loss: Tensor | None  # the target's own cross entropy on the same tokens
    agreement: Tensor | None  # share of the tokens at which draft and target prefer the same next token


def _stacked(outputs: list[GlideOutput]) -> GlideOutput:
    """The outputs of several lags side by side."""

    def stacked(values: list[Tensor | None]) -> Tensor | None:
        there = [value for value in values if value is not None]
        return torch.stack(there) if there else None

    llm_loss, agreement = (stacked([getattr(output, name) for output in outputs]) for name in ("llm_loss", "agreement"))
    return GlideOutput(torch.stack([output.loss for output in outputs]), llm_loss, agreement)


class Glide(nn.Module):
    """A frozen target and its trainable draft.

    The target is kept out of the registered modules: an engine then neither shards, casts nor saves it, and the state
    dict holds `draft_model.*` alone.
    """

    families: ClassVar[tuple[str, ...]] = ()
    states: TargetStates

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
        it, else float32; draft: the variant, None = what the draft's config.json says, else the published one; states: the
        target when it is loaded already; attention: the backend of target and draft (attention.py), "auto" = the fastest
        that is there. Raises ValueError for a target or a draft that does not fit.
        """
        super().__init__()
        if config.model_type not in self.families:
            raise ValueError(
                f"{target_model_path}: config.json: model_type {config.model_type!r} is not supported by "
                f"{type(self).__name__}, which takes {', '.join(self.families)}; choose another model _target_"
            )
        if glide_path is not None:
            check_draft_config(glide_path, config)
        self.config = config
        self.draft_settings = draft or draft_settings(glide_path) or replace(PUBLISHED)
        if states is None:
            check_backend(attention)
            target = load_target(target_model_path, config, dtype or resolve_dtype("auto"), STATES_ATTENTION)
            states = TargetStates(target, attention=attention)
        object.__setattr__(self, "states", states)
        self.draft_model = fresh_layer(states, final_norm=self.draft_settings.final_norm)
        if glide_path is not None:
            load_draft_weights(self.draft_model, glide_path)

    @classmethod
    def from_pretrained(cls, target_model_path: str, **arguments: Any) -> "Glide":
        """Build from a target's folder or hub name, or from a draft folder and the target it names.

        Arguments as of the constructor.
        """
        target_model_path, glide_path = target_and_draft(target_model_path, arguments.pop("glide_path", None))
        return cls(read_target_config(target_model_path), target_model_path, glide_path, **arguments)

    def _apply(self, fn: Any, recurse: bool = True) -> "Glide":
        """The target, which is not registered, follows the draft to its device; its dtype stays."""
        super()._apply(fn, recurse)
        self.states.follow(next(self.draft_model.parameters()).device)
        return self

    @property
    def target(self) -> Any:
        """The frozen target, transformers' causal language model."""
        return self.states.target

    @property
    def model(self) -> Any:
        """The frozen target without its head."""
        return self.target.model

    @property
    def lm_head(self) -> Any:
        """The frozen target's head, shared by the draft."""
        return self.target.lm_head

    def rope(self, position_ids_BS: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of the target's own rotary positions, [B, S, D] each, in the dtype of `like`."""
        return self.model.rotary_emb(like, position_ids_BS)

    def target_states(
        self, input_ids_BS: Tensor, position_ids_BS: Tensor, document_ids_BS: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The target's last-layer keys and values [B, K, S, D] and its final hidden states [B, S, H]."""
        *_, keys_BKSD, values_BKSD, hidden_BSH = self.states(input_ids_BS, position_ids_BS, document_ids_BS)
        assert hidden_BSH is not None
        return keys_BKSD, values_BKSD, hidden_BSH

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        lag: int | Tensor | str | tuple[int, ...] | None = None,
        document_ids: Tensor | None = None,
        num_labels: int | Tensor | None = None,
        with_llm_loss: bool = True,
    ) -> GlideOutput:
        """Teacher-forced loss of the draft.

        input_ids, labels int64 [B, S], -100 = not trained; position_ids [B, S], None = plain; lag: the newest target
        keys a query does not see: None = 1, an int, int64 [B], "blocks", or a tuple of ints: the draft runs once with each,
        the target once for all; document_ids [B, S] for packed rows, of which the last token of each document is not trained;
        num_labels: the loss is divided by it, None = this call's own number of labels; with_llm_loss: measure the target
        too. Hard labels without it end the target's forward after its last layer's keys and values. Raises ValueError
        that names what is out of range.
        """
        check_shapes(input_ids, labels=labels, position_ids=position_ids, document_ids=document_ids)
        if num_labels is not None and num_labels <= 0:
            raise ValueError(f"num_labels: must be above 0, is {num_labels}")
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        lags = [self._lag(each, input_ids) for each in (lag if isinstance(lag, tuple) else (lag,))]
        for lag_B in lags:
            check_ranges(input_ids, labels, position_ids, lag_B, self.config.vocab_size, position_limit(self.config))
        keys_only = self.draft_settings.loss == "hard" and not with_llm_loss
        embedded_BSH, cos_BSD, sin_BSD, *cached, teacher_BSH = self.states(input_ids, position_ids, document_ids, keys_only)
        rope = (cos_BSD, sin_BSD)
        next_labels = labels[:, 1:]
        if document_ids is not None:  # a document's last token says nothing of the next one's first
            next_labels = next_labels.masked_fill(document_ids[:, 1:] != document_ids[:, :-1], NO_LABEL)
        outputs = []
        for lag_B in lags:
            hidden_BSH = self.draft_model(
                embedded_BSH,
                rope,
                self.draft_model.own_keys_values(embedded_BSH, rope),
                tuple(cached),
                Visibility(window=self.draft_settings.window, document_ids_BT=document_ids),
                self._target_visibility(lag_B, document_ids),
                self.states.attention,
            )
            outputs.append(self._losses(hidden_BSH, teacher_BSH, next_labels, num_labels, with_llm_loss))
        return _stacked(outputs) if isinstance(lag, tuple) else outputs[0]

    def _lag(self, lag: int | Tensor | str | None, input_ids: Tensor) -> Tensor | None:
        """The lag of each row, [B]; None for blocks."""
        if not isinstance(lag, str):
            return lag_per_row(lag, input_ids)
        if lag != BLOCKS:
            raise ValueError(f"lag: {lag!r} is unknown; give an int, a tensor [B] or {BLOCKS!r}")
        return None

    def _target_visibility(self, lag_B: Tensor | None, document_ids: Tensor | None) -> Visibility:
        if lag_B is None:
            return Visibility(lag_blocks=self.draft_settings.block, document_ids_BT=document_ids)
        return Visibility(lag_B=lag_B, document_ids_BT=document_ids)

    def _losses(
        self,
        hidden_BSH: Tensor,
        teacher_BSH: Tensor | None,
        next_labels_BS: Tensor,
        num_labels: int | Tensor | None,
        with_llm_loss: bool,
    ) -> GlideOutput:
        """Losses of the tokens whose next token is trained; labels [B, S - 1]."""
        trained_BS = next_labels_BS != NO_LABEL
        labels_N = next_labels_BS[trained_BS]
        count = max(1, len(labels_N))
        with self.states.gather([self.lm_head.weight]):
            sums = linear_cross_entropy(
                hidden_BSH[:, :-1][trained_BS],
                None if teacher_BSH is None else teacher_BSH[:, :-1][trained_BS],
                self.lm_head.weight,
                labels_N,
                self.draft_settings.loss,
                self.draft_settings.temperature,
            )
        return GlideOutput(
            loss=sums.draft / (count if num_labels is None else num_labels),
            llm_loss=sums.target / count if sums.target is not None and with_llm_loss else None,
            agreement=sums.agreements / count if sums.agreements is not None else None,
        )
