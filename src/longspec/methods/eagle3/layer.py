"""Define the EAGLE-3 draft's one decoder layer with its projection, norm and own head (arXiv 2503.01840, section 3), and its
configuration: as torch builds it here, and as engines find it in config.json.

Slot t holds the embedding of token t + 1 and a feature: of token t in a chain's first step, later the draft's own hidden state.

Facts read in vLLM 0.32 (model_executor/models/llama_eagle3.py, v1/worker/gpu_model_runner.py), SGLang 0.5.23
(srt/models/llama_eagle3.py, model_runner_components/spec_aux_hidden_state.py) and transformers 5.23 (LlamaConfig):

auxiliary layers: vLLM reads eagle_aux_hidden_state_layer_ids itself first, and means inputs of layers; SGLang reads only
    eagle_config and means outputs: it adds one to each. So the numbers here name inputs; those in eagle_config are one less.
norm_before_residual: the residual is the feature after hidden_norm, not the feature itself. norm_before_fc: one norm over all
    auxiliary states together, `input_norm.weight`; fc_norm: one for each, `fc_norm.0.weight` and so on. norm_output: the normed
    hidden state is fed back. vLLM reads all four, SGLang none.
sliding_window counts the query itself, and applies where layer_types says so; only vLLM reads it from here.
rope_parameters is transformers' form since 5.0; rope_theta, rope_scaling and partial_rotary_factor are the older form.
dtype: the target's, in which an engine computes; the files hold what was trained. An engine that may choose takes float16 for a
    draft that says float32.

Shapes: B rows, S slots, H hidden width, N query heads, K key/value heads, D head width, V draft vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from longspec.methods.eagle3.settings import ARCHITECTURE, AUXILIARY, NORMS, Settings
from longspec.methods.layer_config import layer_config, shape_fields
from longspec.methods.own_layers import DraftHead, OwnLayers
from longspec.models.draft_attention import DraftAttention, draw_weights, norm_of

# (rotated queries [B, N, S, D], rotated keys and values of the slots [B, K, S, D]) -> attention's output [B, N, S, D].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Midlayer(nn.Module):
    """Compute the decoder layer. Its parameters have the names that engines load.

    norm_before_residual: the attention's output is added to the normed feature, not to the feature itself.
    """

    def __init__(self, config: PretrainedConfig, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.self_attn = DraftAttention(config, 2 * config.hidden_size, biases=False)
        self.mlp = Qwen2MLP(config)  # without biases
        self.input_layernorm = norm_of(config)
        self.hidden_norm = norm_of(config)
        self.post_attention_layernorm = norm_of(config)

    def both(self, embedded_BSH: Tensor, normed_BSH: Tensor) -> Tensor:
        """Return the input [B, S, 2H] of the self attention, from embeddings and features normed by hidden_norm."""
        return torch.cat([self.input_layernorm(embedded_BSH), normed_BSH], dim=-1)

    def forward(self, embedded_BSH: Tensor, feature_BSH: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Return the hidden states [B, S, H]."""
        normed_BSH = self.hidden_norm(feature_BSH)
        residual_BSH = normed_BSH if self.norm_before_residual else feature_BSH
        both_BSE = self.both(embedded_BSH, normed_BSH)
        hidden_BSH = residual_BSH + self.self_attn(
            both_BSE, rope, lambda q_BNSD: attend(q_BNSD, *self.self_attn.keys_values(both_BSE, rope))
        )
        return hidden_BSH + self.mlp(self.post_attention_layernorm(hidden_BSH))


class Eagle3Layer(OwnLayers):
    """Compute a draft's chains: the trainable module.

    `fc_norm`: each auxiliary hidden state has its own norm before the projection. `norm_output`: what is fed back is normed as
    for the head (EAGLE-3.1). `input_norm` (norm_before_fc): one norm over all auxiliary states, before any fc_norm.
    """

    lm_head: DraftHead

    def __init__(self, config: PretrainedConfig, settings: Settings) -> None:
        super().__init__(config, settings)
        width, proposed = config.hidden_size, settings.vocabulary or config.vocab_size
        config = layer_config(config, settings)
        self.norm_output = settings.norm_output
        self.input_norm = norm_of(config, AUXILIARY * width) if settings.norm_before_fc else None
        self.fc_norm = nn.ModuleList([norm_of(config) for _ in range(AUXILIARY if settings.fc_norm else 0)])
        self.fc = nn.Linear(AUXILIARY * width, width, bias=False)
        self.midlayer = Midlayer(config, settings.norm_before_residual)
        self.norm = norm_of(config)
        self.lm_head = DraftHead(width, proposed, bias=False)
        if settings.vocabulary is None:
            self.ids_V = torch.arange(proposed)
        draw_weights(self, config.initializer_range)

    def begin(self, states: Any, settings: Settings) -> None:
        """Copy the target's norm and head.

        settings.start "identity": the layer passes the input of the last auxiliary layer through, so that norm and head read
        nearly what they read in the target; attention and feed-forward part add nothing yet.
        """
        super().begin(states, settings)
        if settings.start == "identity":
            with torch.no_grad():
                self.fc.weight.zero_()[:, -self.fc.out_features :].fill_diagonal_(1)
                self.midlayer.self_attn.o_proj.weight.zero_()
                self.midlayer.mlp.down_proj.weight.zero_()

    def feature(self, auxiliary: Sequence[Tensor]) -> Tensor:
        """Return the features [B, S, H] of a chain's first step. auxiliary: the target's hidden states in the layers' order."""
        if self.input_norm is not None:
            auxiliary = self.input_norm(torch.cat(list(auxiliary), dim=-1)).chunk(AUXILIARY, dim=-1)
        if len(self.fc_norm):
            auxiliary = [norm(hidden_BSH) for norm, hidden_BSH in zip(self.fc_norm, auxiliary, strict=True)]
        return self.fc(torch.cat(list(auxiliary), dim=-1))

    def fed_back(self, hidden_BSH: Tensor) -> Tensor:
        """Return the features of a chain's next step, from the hidden states of this one."""
        return self.norm(hidden_BSH) if self.norm_output else hidden_BSH

    def logits(self, hidden_BSH: Tensor) -> Tensor:
        """Return logits [B, S, V] of the draft vocabulary."""
        return self.lm_head(self.norm(hidden_BSH))


def config_fields(config: Any, settings: Settings) -> dict[str, Any]:
    """Return the fields of config.json. Raises ValueError if the target lacks a layer that is read."""
    layers = list(settings.read_of(config.num_hidden_layers))
    fields = shape_fields(config, settings) | {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": settings.vocabulary or config.vocab_size,
        "mlp_bias": False,
        "eagle_aux_hidden_state_layer_ids": layers,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers]},
        **{name: getattr(settings, name) for name in NORMS},
        "settings": {"layers": layers},
    }
    if settings.sliding_window is not None:
        fields |= {"layer_types": ["sliding_attention"], "sliding_window": settings.sliding_window}
    return fields
