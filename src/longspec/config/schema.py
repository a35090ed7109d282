"""Type the sections of a configuration: each key's type, bound, words and one sentence of help, which completes "it is ...".

`recipe` decides the weights, `runtime` does not, `build` makes a small target of our own, `files` is for the trainer
started by hand (in the workflow the rules name the files). What must fit together: checks.py.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any

from omegaconf import MISSING
from pydantic import ConfigDict, Field

from longspec.config.typed import (
    YEAR_MINUTES,
    Count,
    CountOrNone,
    Filled,
    Flag,
    Keys,
    Name,
    NameOrMix,
    Number,
    Once,
    PartOfAll,
    Rate,
    Replayed,
    RowTokens,
    Seed,
    Share,
    Size,
    Text,
    Tokens,
    Whole,
    checked_as,
    means,
    words,
)
from longspec.distributed import sharing_ranks

# Metadata of a field that is newer than the first frozen recipes. The field is not written at its default value, so that no
# finished stage is trained again for it.
LATER = {"later": True}

COLLATIONS = {"base": False, "long": True, "long-nomask": False, "longcot": True}  # whether only answers are trained
OVERLONG = ("split", "truncate")
DTYPES = {"bf16": "torch.bfloat16", "fp32": "torch.float32"}  # of a precision that is no choice of the machine
PRECISIONS = ("auto", "fastest", *DTYPES)
OFFLINE = "offline"  # recipe.states.source
MUON, LINEAR = "muon", "linear"  # recipe.optimizer.name and recipe.optimizer.schedule
REPLICATED, PARTITIONED, TENSOR_PARALLEL = "replicated", "partitioned", "tensor_parallel"
# What a draft learns: the text's tokens, or the target's distribution by cross entropy, total variation or a hybrid of both.
HARD, SOFT, TV, LK = "hard", "soft", "tv", "lk"
TRACKERS = ("tensorboard", "wandb", "swanlab")
ATTENTION = ("auto", "flash_attention_2", "flex_attention", "sdpa")


class Known:
    """Have pydantic refuse any other key of a dataclass."""

    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass
class Model(Known):
    """The target whose draft is trained."""

    name: Annotated[Name, means("the name of its folder, models/<name>")] = MISSING
    source: Annotated[Text, means("build (made here), hf:<repository>, a folder, a .gguf file or one of a wheel")] = MISSING
    family: Annotated[Text | None, means("its model_type, of longspec.families")] = field(default=None, metadata=LATER)
    _target_: Annotated[Text | None, means("the published class, which says family and method")] = field(
        default=None, metadata=LATER
    )
    sha256: Annotated[Text | None, means("the SHA-256 of the .gguf file; needed for one of a wheel")] = field(
        default=None, metadata=LATER
    )


@dataclass
class Data(Known):
    """The rows that a stage trains on."""

    name: Annotated[
        NameOrMix,
        means("a data set of `data`, or several with their shares of the trained tokens, such as {chats: 0.7, books: 0.3}"),
    ] = MISSING
    sequence_length: Annotated[RowTokens, means("the number of tokens in a row")] = MISSING
    collation: Annotated[
        str, words(*COLLATIONS), means("what is trained: every token (base, long-nomask), or answers only (long, longcot)")
    ] = MISSING
    overlong: Annotated[str, words(*OVERLONG), means("what is done with documents longer than a row")] = "split"
    replay: Annotated[
        dict[Replayed, PartOfAll],
        means("the share of the trained tokens that is of earlier stages' data, by the stages' names, such as {base: 0.2}"),
    ] = field(default_factory=dict, metadata=LATER)


def mix_of(name: Any) -> dict[str, float]:
    """Return the shares of a stage's own data sets, sorted by name. name: recipe.data.name."""
    return {name: 1.0} if isinstance(name, str) else dict(sorted(name.items()))


def shares_of(data: Any) -> list[float]:
    """Return the share of each source of rows: the stage's own data sets, then what it replays, both sorted by name."""
    own = 1 - sum(data.replay.values())
    return [*(own * share for share in mix_of(data.name).values()), *(share for _, share in sorted(data.replay.items()))]


def mix_told(name: Any) -> str:
    """Return a stage's data in words."""
    return name if isinstance(name, str) else ", ".join(f"{each} {share:.0%}" for each, share in mix_of(name).items())


@dataclass
class Optimizer(Known):
    """How a step changes the weights: linear warm-up, then down to a ten-thousandth of the rate (train.engine.FLOOR)."""

    lr: Annotated[Rate, means("the learning rate after the warm-up")] = MISSING
    betas: Annotated[
        list[Annotated[Number, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2), means("the two decays of AdamW")
    ] = field(default_factory=lambda: [0.9, 0.95])
    eps: Annotated[Rate, means("AdamW's epsilon")] = 1e-6
    weight_decay: Annotated[Number, Field(ge=0, le=10), means("the decay of the weights")] = 0.1
    warmup_ratio: Annotated[Share, means("the share of the steps in which the rate rises")] = 0.1
    clip: Annotated[Number, Field(ge=0, le=10**6), means("the gradient's norm at most; 0: not clipped")] = 1.0
    name: Annotated[
        str, words("adamw", MUON), means("AdamW, or Muon for matrices and AdamW for all else, with ZeRO-0 alone")
    ] = field(default="adamw", metadata=LATER)
    schedule: Annotated[str, words("cosine", LINEAR), means("the rate's way down")] = field(default="cosine", metadata=LATER)


@dataclass
class States(Known):
    """Where the target's states come from that a draft is trained on."""

    source: Annotated[
        str, words("online", OFFLINE), means("a forward in every step, or files that a job for each shard has made")
    ] = "online"
    dtype: Annotated[
        str,
        words("bfloat16", "float8", "float32"),
        means("the type in which states are stored; float8: e4m3, scaled by token and head"),
    ] = "bfloat16"
    top_k: Annotated[
        Tokens | None, means("so many likeliest tokens, stored in place of the target's final hidden state; null: that state")
    ] = None


@dataclass
class Recipe(Known):
    """Settings of a stage that change the weights it trains."""

    stage: Annotated[Name, means("the stage's name")] = MISSING
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    method: Any = MISSING  # which draft, and its shape; typed by the method's settings
    draft: Any = MISSING  # its variant, how it is trained; typed by the method's settings
    optimizer: Optimizer = field(default_factory=Optimizer)
    global_batch: Annotated[Tokens, means("the number of rows in one optimizer step")] = MISSING
    epochs: Annotated[Whole, Field(ge=1, le=10**6), means("how often the data is read")] = 1
    steps: Annotated[
        Count | None, means("the number of optimizer steps; null: as many whole global batches as the epochs hold")
    ] = None
    init: Annotated[Filled | None, means("a published draft that the first stage begins with: hf:<repository> or a folder")] = (
        field(default=None, metadata=LATER)
    )
    precision: Annotated[
        str,
        words(*PRECISIONS),
        means("the precision of training; auto: bf16 on GPUs that have it, else fp32; fastest: bf16 on processors too"),
    ] = "auto"
    seed: Annotated[Seed, means("the seed of weights, order and draws")] = 42
    states: States = field(default_factory=States, metadata=LATER)


@dataclass
class DeepSpeed(Known):
    """How DeepSpeed shards the draft's training state. A stage may go on with other choices than it was begun with."""

    zero_stage: Annotated[
        Whole,
        Field(ge=0, le=3),
        means("what is shared by the ranks; 0: nothing, 1: the optimizer, 2: gradients too, 3: weights too"),
    ] = 1
    offload_optimizer: Annotated[
        str,
        words("none", "cpu", "nvme"),
        means("where the optimizer's state lies; nvme: ZeRO-3 alone; DeepSpeed compiles an operator"),
    ] = "none"
    nvme_path: Annotated[Text | None, means("a folder on a fast local disk, for offload_optimizer: nvme")] = None


@dataclass
class Runtime(Known):
    """Settings of a stage that leave its weights as they are: speed, memory, logging."""

    micro_batch: Annotated[Tokens, means("the number of rows in one forward of one rank, at most")] = 1
    attention: Annotated[str, words(*ATTENTION), means("how the draft attends; auto: the fastest that is there")] = "auto"
    save_every: Annotated[Count, means("the most optimizer steps between checkpoints")] = 200
    save_minutes: Annotated[Count, means("the most minutes between checkpoints; they are made after whole steps")] = field(
        default=30, metadata=LATER
    )
    log_every: Annotated[Count, means("the number of optimizer steps between lines of the log; metrics.jsonl has each")] = 1
    target: Annotated[
        str,
        words(REPLICATED, PARTITIONED, TENSOR_PARALLEL),
        means(
            "where the target lies: whole on every GPU, over them all by ZeRO-3 and gathered layer by layer, or by heads and "
            "columns of each layer, so that all GPUs together take each one's rows through it"
        ),
    ] = REPLICATED
    target_chunk: Annotated[Tokens | None, means("the number of tokens in one forward of the target; null: whole rows")] = None
    held_out_every: Annotated[
        CountOrNone, means("the number of optimizer steps between estimates of acceptance on held-out text; 0: none")
    ] = 0
    held_out_rows: Annotated[Count, means("the number of held-out rows of such an estimate, of each data set")] = 1
    log_target_loss: Annotated[
        Flag, means("whether the target's own loss is logged; without it hard labels need no more of it than keys and values")
    ] = True
    timeout_minutes: Annotated[
        Whole, Field(ge=1, le=YEAR_MINUTES), means("the minutes that a collective operation may take")
    ] = 30
    watchdog_seconds: Annotated[
        Whole,
        Field(ge=1, le=60 * YEAR_MINUTES),
        means("the seconds that a micro batch or a save may take; a rank that takes longer ends the job with its stacks"),
    ] = 600
    stop_margin_seconds: Annotated[
        Whole,
        Field(ge=0, le=60 * YEAR_MINUTES),
        means("the seconds to spare before the job's deadline, beside a micro batch and two saves"),
    ] = 60
    max_skipped_in_a_row: Annotated[
        Count, means("the number of steps in a row that may be skipped because loss or gradient is not finite")
    ] = 5
    report_to: Annotated[list[Annotated[str, words(*TRACKERS, "none")]], Once, means("the trackers; none stands alone")] = (
        field(default_factory=lambda: ["none"])
    )
    tracker_mode: Annotated[str, words("online", "offline"), means("whether trackers use a network or write files alone")] = (
        "online"
    )
    tracker_project: Annotated[Text, means("the project's name there")] = "longspec"
    tracker_run: Annotated[Text | None, means("the run's name there; null: the last parts of the stage's folder")] = None
    peak_tflops: Annotated[
        Number | None,
        Field(gt=0, le=10**6),
        means("the peak of one GPU, for the share of it that is used; null: its data sheet"),
    ] = None
    deepspeed: DeepSpeed = field(default_factory=DeepSpeed)
    extract_at_end: Annotated[Flag, means("whether the trainer writes the finished stage's draft to its draft/")] = field(
        default=False, metadata=LATER
    )
    ranks: Annotated[
        Count | None,
        means("the most processes of the workflow's job, one a GPU; null: all that the profile has, one on stored states"),
    ] = field(default=None, metadata=LATER)


def processes_of(recipe: Any, runtime: Any, nodes: int, ranks: int) -> tuple[int, int]:
    """Return how many of `nodes`, with `ranks` processes each, a stage takes, and its own processes on each of them.

    In all it takes runtime.ranks; if that is unset, all of them, or one on stored states.
    """
    wanted = runtime.ranks or (1 if recipe.states.source == OFFLINE else nodes * ranks)
    taken = min(nodes, -(-wanted // ranks))
    return taken, sharing_ranks(recipe.global_batch, taken, min(ranks, wanted // taken))


class Phase(Keys):
    """One phase of training a target."""

    dataset: Name = Field(description="a data set of the run")
    sequence_length: RowTokens = Field(description="the number of tokens in a row")
    rows: Tokens = Field(description="the number of rows in a step")
    steps: Count = Field(description="the number of steps")


@dataclass
class Build(Known):
    """A small Qwen2 target trained inside the workflow."""

    # At least the bytes and the special tokens.
    vocabulary: Annotated[Whole, Field(ge=256 + 3, le=2**24), means("the number of tokens")] = 1024
    hidden: Annotated[Size, means("the width of its hidden states")] = 128
    layers: Annotated[Size, means("the number of layers")] = 3
    heads: Annotated[Size, means("the number of attention heads")] = 4
    key_value_heads: Annotated[Size, means("the number of heads of keys and values")] = 2
    intermediate: Annotated[Size, means("the width of its feed-forward part")] = 384
    max_position: Annotated[Tokens, means("the number of positions")] = 32768
    rope_theta: Annotated[Number, Field(gt=0, le=10**12), means("the base of its rotations")] = 10000.0
    mixture: Annotated[list[Annotated[dict[str, Any], checked_as(Phase)]], means("the phases of its training, in order")] = (
        field(default_factory=list)
    )
    lr: Annotated[Rate, means("the learning rate after the warm-up")] = 2e-3
    warmup_ratio: Annotated[Share, means("the share of the steps in which the rate rises")] = 0.05
    seed: Annotated[Seed, means("the seed of weights and order")] = 0
