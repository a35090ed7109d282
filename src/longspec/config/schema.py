"""The sections of a configuration, typed.

`recipe` decides the weights, `runtime` does not, `build` makes a small target of our own, `files` is for the trainer
started by hand (in the workflow the rules name the files). Which numbers are possible: ranges.py; which words: checks.py.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

# Metadata of a field that is newer than the first frozen recipes: it is not written while it has its default value, so
# that no finished stage is trained again for it.
LATER = {"later": True}


@dataclass
class Model:
    """The target whose draft is trained."""

    name: str = MISSING  # key of models/{name}
    source: str = MISSING  # "build" (made by the workflow), "hf:<repository>", a folder, a .gguf file or names.WHEEL_FORM
    family: str | None = field(default=None, metadata=LATER)  # its model_type, of families.FAMILIES
    _target_: str | None = field(default=None, metadata=LATER)  # or the published class, which says family and method
    sha256: str | None = field(default=None, metadata=LATER)  # of the .gguf file; needed for one of a wheel


@dataclass
class Data:
    """The rows that a stage trains on."""

    name: str = MISSING  # key of `data` in config/workflow.yaml
    sequence_length: int = MISSING  # tokens in a row
    collation: str = MISSING  # base | long-nomask: every token is trained; long | longcot: answers only
    overlong: str = "split"  # split | truncate documents longer than a row
    # Shares of the trained tokens that are those of earlier stages' data, by the stages' names, such as {base: 0.2}.
    replay: dict[str, float] = field(default_factory=dict, metadata=LATER)


@dataclass
class Optimizer:
    """How a step changes the weights: linear warm-up, then down to a ten-thousandth of the rate (train.engine.FLOOR)."""

    lr: float = MISSING
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-6
    weight_decay: float = 0.1
    warmup_ratio: float = 0.1
    clip: float = 1.0  # the gradient's norm at most; 0: not clipped
    name: str = field(default="adamw", metadata=LATER)  # adamw | muon: matrices by Muon, all else by AdamW; ZeRO-0 alone
    schedule: str = field(default="cosine", metadata=LATER)  # the way down: cosine | linear


@dataclass
class States:
    """Where the target's states come from that a draft is trained on."""

    source: str = "online"  # online: from a forward in every step | offline: from files that a job for each shard has made
    # The rest is of states that are stored.
    dtype: str = "bfloat16"  # bfloat16 | float8 (e4m3, with a float32 scale a token and head) | float32
    top_k: int | None = None  # likeliest tokens of the target's distribution, stored in place of its final hidden state


@dataclass
class Recipe:
    """Settings of a stage that change the weights it trains."""

    stage: str = MISSING
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    method: Any = MISSING  # which draft, and its shape; typed by the method's settings
    draft: Any = MISSING  # its variant, how it is trained; typed by the method's settings
    optimizer: Optimizer = field(default_factory=Optimizer)
    global_batch: int = MISSING  # rows in one optimizer step
    epochs: int = 1
    steps: int | None = None  # optimizer steps; null: as many whole global batches as the epochs hold
    init: str | None = field(default=None, metadata=LATER)  # a published draft the first stage begins with: hf:... or a folder
    precision: str = "auto"  # auto: bf16 on GPUs that have it, else fp32 | fastest: bf16 on processors too | bf16 | fp32
    seed: int = 42
    states: States = field(default_factory=States, metadata=LATER)


@dataclass
class DeepSpeed:
    """How DeepSpeed shards the draft's training state. A stage may go on with other choices than it was begun with."""

    zero_stage: int = 1  # 0: every rank holds all | 1: optimizer shared | 2: gradients too | 3: weights too
    offload_optimizer: str = "none"  # none | cpu | nvme (ZeRO-3 alone; DeepSpeed compiles an operator for it)
    nvme_path: str | None = None  # a folder on a fast local disk, for offload_optimizer: nvme


@dataclass
class Runtime:
    """Settings of a stage that leave its weights as they are: speed, memory, logging."""

    micro_batch: int = 1  # rows in one forward of one rank, at most
    attention: str = "auto"  # auto: the fastest that is there | flash_attention_2 | flex_attention | sdpa
    save_every: int = 200  # optimizer steps
    log_every: int = 1
    # replicated: whole on every GPU | partitioned: over them all by ZeRO-3, gathered layer by layer | tensor_parallel: by
    # heads and columns of each layer, so that all GPUs together take each one's rows through the target
    target: str = "replicated"
    target_chunk: int | None = None  # tokens in one forward of the target; null: whole rows
    held_out_every: int = 0  # optimizer steps between estimates of acceptance on held-out text; 0: none
    held_out_rows: int = 1  # rows of it
    log_target_loss: bool = True  # false: hard labels need no more of the target than its last layer's keys and values
    timeout_minutes: int = 30  # of a collective operation
    watchdog_seconds: int = 600  # a rank without progress for so long ends the job by its name
    stop_margin_seconds: int = 60  # to spare before the job's deadline, beside a micro batch and two saves
    max_skipped_in_a_row: int = 5  # steps whose loss or gradient is not finite
    report_to: list[str] = field(default_factory=lambda: ["none"])  # any of tensorboard, wandb, swanlab; or none alone
    tracker_mode: str = "online"  # offline: trackers write files and touch no network
    tracker_project: str = "longspec"
    tracker_run: str | None = None  # the run's name there; null: the last parts of the stage's folder
    peak_tflops: float | None = None  # of one GPU, for its share used; null: its data sheet
    deepspeed: DeepSpeed = field(default_factory=DeepSpeed)
    extract_at_end: bool = field(default=False, metadata=LATER)  # true: the finished stage's draft is written to its draft/
    # Processes of the workflow's job, one a GPU, at most; null: all that the profile's `train` has, one on stored states
    ranks: int | None = field(default=None, metadata=LATER)


@dataclass
class Build:
    """A small Qwen2 target trained inside the workflow."""

    vocabulary: int = 1024
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    key_value_heads: int = 2
    intermediate: int = 384
    max_position: int = 32768
    rope_theta: float = 10000.0
    # Phases of training, in order: dataset, row length, rows in a step, steps.
    mixture: list[dict[str, Any]] = field(default_factory=list)
    lr: float = 2e-3
    warmup_ratio: float = 0.05
    seed: int = 0


@dataclass
class Files:
    """Where the trainer started by hand finds and leaves things; not part of the frozen configuration."""

    target: str = MISSING
    data: str = MISSING
    init_weights: str | None = None
    vocabulary: str | None = None  # draft_vocabulary_{size}.json, where recipe.method.vocabulary is a number
    states: str | None = None  # manifest.json of stored states, where recipe.states.source is offline
    held_out_states: str | None = None  # and shard.json of those of the held-out rows, where these are measured
    replay: dict[str, str] = field(default_factory=dict)  # manifests of packed rows by the stages of recipe.data.replay
    replay_states: dict[str, str] = field(default_factory=dict)  # and of their stored states
    out: str = MISSING


@dataclass
class Config:
    """All sections of one stage's configuration."""

    recipe: Recipe = field(default_factory=Recipe)
    runtime: Runtime = field(default_factory=Runtime)
    build: Build = field(default_factory=Build)
    files: Files = field(default_factory=Files)
