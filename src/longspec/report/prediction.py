"""Predicts the speed-up from the acceptance length and the cost ratio: tau / (1 + gamma * c).

One round costs gamma draft steps and one step of the target, and yields tau tokens; decoding one stream is bound by the
weights it reads, so a step's cost is the number of parameters it reads.
"""

from dataclasses import dataclass
from typing import Any

from longspec.methods import settings_of


@dataclass(frozen=True)
class Shape:
    """The sizes of a target, as its config.json names them."""

    name: str
    model_type: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    expert_width: int = 0  # of all experts that one token passes; 0: every layer is intermediate_size wide
    published: str = ""  # what LongSpec reports for it, with trees of drafts

    @property
    def head(self) -> int:
        """Return weights of the output head, which target and draft both read for every token."""
        return self.hidden_size * self.vocab_size

    @property
    def read(self) -> int:
        """Return weights that the target reads for every token.

        Embeddings (a row each) are not counted, nor norms, biases and routers (below 0.1 %).
        """
        attention = 2 * self.head_dim * (self.num_attention_heads + self.num_key_value_heads)
        layer = self.hidden_size * (attention + 3 * (self.expert_width or self.intermediate_size))
        return self.num_hidden_layers * layer + self.head


# From the config.json of Qwen/QwQ-32B and meta-llama/Llama-3.1-8B-Instruct; figures from arXiv 2502.17421.
PUBLISHED = (
    Shape("QwQ-32B", "qwen2", 64, 5120, 27648, 40, 8, 128, 152064, published="τ 3.82, 2.25× (AIME24)"),
    Shape("Llama-3.1-8B", "llama", 32, 4096, 14336, 32, 8, 128, 128256, published="τ 2.99–3.39, 1.48–1.69× (LongBench)"),
)


def shape_of(name: str, config: dict[str, Any]) -> Shape:
    """Return the shape in a target's config.json."""
    heads, experts = config["num_attention_heads"], config.get("num_experts_per_tok") or 0
    beside = {
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "expert_width": experts * (config.get("moe_intermediate_size") or config["intermediate_size"]),
    }
    sizes = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    return Shape(name, config["model_type"], **{key: config[key] for key in sizes}, **beside)


def cost_ratio(shape: Shape, layer: int, head_share: float, *, with_head: bool = True) -> float:
    """Return the parameters the draft reads per token, over those the target reads.

    layer: of the draft's layer; head_share: of the rows of the target's head, those of the draft's.
    """
    return (layer + head_share * shape.head) / shape.read if with_head else layer / (shape.read - shape.head)


def predictions(own: Shape, tau: float, gamma: int, method: Any, head_share: float) -> list[dict[str, Any]]:
    """Return one row for the run's own target and each published shape, all at the run's tau, gamma and head_share.

    method: the recipe's section, which decides the draft's layer beside the own target; published shapes have its defaults.
    """
    rows, forwards = [], 1 if settings_of(method.name).ONE_FORWARD else gamma
    for shape in (own, *PUBLISHED):
        layer = settings_of(method.name).layer_weights(shape, None if shape.published else method)
        whole, without_head = (cost_ratio(shape, layer, head_share, with_head=counted) for counted in (True, False))
        rows.append(
            {
                "target": shape.name,
                "layers": shape.num_hidden_layers,
                "target_parameters": shape.read,
                "draft_parameters": layer + round(head_share * shape.head),
                "cost_ratio": whole,
                "cost_ratio_without_head": without_head,
                "speed_up": tau / (1 + forwards * whole),
                "speed_up_without_head": tau / (1 + forwards * without_head),
                "published": shape.published,
            }
        )
    return rows
