"""The configuration: Hydra composes it, dataclasses type it, canonical YAML freezes it.

`recipe` decides the weights, `runtime` does not, `build` makes a small target of our own, `files` is for the trainer
started by hand (in the workflow the rules name the files). Snakemake imports this module: no torch here.
"""

from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from longspec import methods
from longspec.families import FAMILIES

# What a mistake in a configuration ends in.
ConfigError = (ValueError, HydraException, OmegaConfBaseException)

CONFIG_DIR = Path(__file__).resolve().parents[2] / "config"


# Of a field that came later than the first frozen recipes: it is not written while it stands at its default, so that no
# finished stage is trained again for it.
LATER = {"later": True}


@dataclass
class Model:
    """The target whose draft is trained."""

    name: str = MISSING  # key of models/{name}
    source: str = MISSING  # "build" (made by the workflow), "hf:<repository>" or a folder's path
    family: str | None = field(default=None, metadata=LATER)  # its model_type: llama, mistral, qwen2, qwen3, qwen3_moe
    _target_: str | None = field(default=None, metadata=LATER)  # or the published class, which says family and method


@dataclass
class Data:
    """What a stage trains on."""

    name: str = MISSING  # key of `data` in config/workflow.yaml
    sequence_length: int = MISSING  # tokens in a row
    collation: str = MISSING  # base | long-nomask: every token is trained; long | longcot: answers only
    overlong: str = "split"  # split | truncate documents longer than a row


@dataclass
class Optimizer:
    """AdamW, linear warm-up, cosine to zero."""

    lr: float = MISSING
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-6
    weight_decay: float = 0.1
    warmup_ratio: float = 0.1
    clip: float = 1.0


@dataclass
class Recipe:
    """What decides the weights."""

    stage: str = MISSING
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    method: Any = MISSING  # which draft, and its shape; typed by the method's settings
    draft: Any = MISSING  # its variant, how it is trained; typed by the method's settings
    optimizer: Optimizer = field(default_factory=Optimizer)
    global_batch: int = MISSING  # rows in one optimizer step
    epochs: int = 1
    steps: int | None = None  # optimizer steps; null: as many whole global batches as the epochs hold
    precision: str = "auto"  # auto: bf16 on GPUs that have it, else fp32 | bf16 | fp32
    seed: int = 42


@dataclass
class DeepSpeed:
    """How DeepSpeed shards the draft's training state. A stage may go on with other choices than it was begun with."""

    zero_stage: int = 1  # 0: every rank holds all | 1: optimizer shared | 2: gradients too | 3: weights too
    offload_optimizer: str = "none"  # none | cpu | nvme (ZeRO-3 alone; DeepSpeed compiles an operator for it)
    nvme_path: str | None = None  # a folder on a fast local disk, for offload_optimizer: nvme


@dataclass
class Runtime:
    """What does not decide the weights."""

    micro_batch: int = 1  # rows in one forward of one rank, at most
    attention: str = "auto"  # auto: the fastest that is there | flash_attention_2 | flex_attention | sdpa | eager (small tests)
    save_every: int = 200  # optimizer steps
    log_every: int = 1
    target: str = "replicated"  # replicated: whole on every GPU | partitioned: over them all by ZeRO-3, gathered layer by layer
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
    peak_tflops: float | None = None  # of one GPU, for its share used; null: its data sheet, else measured at the start
    deepspeed: DeepSpeed = field(default_factory=DeepSpeed)


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
    out: str = MISSING


@dataclass
class Config:
    """All sections of one stage's configuration."""

    stages: list[str] = field(default_factory=list)  # of the run, in order
    recipe: Recipe = field(default_factory=Recipe)
    runtime: Runtime = field(default_factory=Runtime)
    build: Build = field(default_factory=Build)
    files: Files = field(default_factory=Files)


ConfigStore.instance().store("schema", Config)
for _name in methods.names():
    _settings = methods.settings_of(_name)
    _typed = {"recipe": {"method": _settings.Method, "draft": _settings.Draft}}
    ConfigStore.instance().store(_name, _typed, group="method_schema", package="_global_")

CHOICES = {
    "data.collation": ("base", "long", "long-nomask", "longcot"),
    "data.overlong": ("split", "truncate"),
    "precision": ("auto", "bf16", "fp32"),
}
REPLICATED, PARTITIONED = "replicated", "partitioned"
TARGETS = (REPLICATED, PARTITIONED)
OFFLOADS = ("none", "cpu", "nvme")
ATTENTION = ("auto", "flash_attention_2", "flex_attention", "sdpa", "eager")
TRACKERS = ("tensorboard", "wandb", "swanlab")
TRACKER_MODES = ("online", "offline")
POSITIVE = (
    "data.sequence_length",
    "global_batch",
    "epochs",
)
POSITIVE_RUNTIME = (
    "micro_batch",
    "save_every",
    "log_every",
    "held_out_rows",
    "timeout_minutes",
    "watchdog_seconds",
    "max_skipped_in_a_row",
)


def check_recipe(recipe: DictConfig) -> None:
    """Cross-checks that types cannot make. Raises ValueError with the field's name and the fix."""
    for name, choices in CHOICES.items():
        value = OmegaConf.select(recipe, name)
        if value not in choices:
            raise ValueError(f"recipe.{name}: {value!r} is unknown; choose one of {', '.join(choices)}")
    for name in POSITIVE:
        if OmegaConf.select(recipe, name) <= 0:
            raise ValueError(f"recipe.{name}: must be above 0, is {OmegaConf.select(recipe, name)}")
    methods.settings_of(recipe.method.name).check(recipe)
    if recipe.steps is not None and recipe.steps <= 0:
        raise ValueError(f"recipe.steps: must be above 0 or null, is {recipe.steps}")
    if not 0 <= recipe.optimizer.warmup_ratio <= 1:
        raise ValueError(f"recipe.optimizer.warmup_ratio: must lie in 0..1, is {recipe.optimizer.warmup_ratio}")


def check_deepspeed(deepspeed: DictConfig) -> None:
    """The same for runtime.deepspeed."""
    stage, offload, path = deepspeed.zero_stage, deepspeed.offload_optimizer, deepspeed.nvme_path
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"runtime.deepspeed.zero_stage: must be 0, 1, 2 or 3, is {stage}")
    if offload not in OFFLOADS:
        raise ValueError(f"runtime.deepspeed.offload_optimizer: {offload!r} is unknown; choose one of {', '.join(OFFLOADS)}")
    if offload != "none" and stage == 0:
        raise ValueError("runtime.deepspeed.offload_optimizer: ZeRO-0 offloads nothing; set it to none, or zero_stage to 1")
    if offload == "nvme" and stage != 3:
        raise ValueError(f"runtime.deepspeed.offload_optimizer: nvme wants zero_stage 3, which is {stage}; set it to cpu")
    if offload == "nvme" and not path:
        raise ValueError("runtime.deepspeed.nvme_path: offload_optimizer is nvme; name a folder on a fast local disk")
    if offload != "nvme" and path:
        raise ValueError(f"runtime.deepspeed.nvme_path: not used, since offload_optimizer is {offload}; set it to null")


def check_runtime(runtime: DictConfig) -> None:
    """The same for the runtime section."""
    check_deepspeed(runtime.deepspeed)
    if runtime.held_out_every < 0:
        raise ValueError(f"runtime.held_out_every: must be above 0, or 0 for none, is {runtime.held_out_every}")
    for name in POSITIVE_RUNTIME:
        if runtime[name] <= 0:
            raise ValueError(f"runtime.{name}: must be above 0, is {runtime[name]}")
    if runtime.target not in TARGETS:
        raise ValueError(f"runtime.target: {runtime.target!r} is unknown; choose one of {', '.join(TARGETS)}")
    if runtime.attention not in ATTENTION:
        raise ValueError(f"runtime.attention: {runtime.attention!r} is unknown; choose one of {', '.join(ATTENTION)}")
    if runtime.target_chunk is not None and runtime.target_chunk <= 0:
        raise ValueError(f"runtime.target_chunk: must be above 0 or null, is {runtime.target_chunk}")
    check_trackers(runtime)


def check_trackers(runtime: DictConfig) -> None:
    """The same for what a step's numbers are reported to."""
    names = list(runtime.report_to)
    for name in names:
        if name not in (*TRACKERS, "none"):
            raise ValueError(f"runtime.report_to: {name!r} is unknown; choose any of {', '.join(TRACKERS)}, or none alone")
    if len(set(names)) < len(names):
        raise ValueError(f"runtime.report_to: {', '.join(names)}: name each tracker once")
    if "none" in names and len(names) > 1:
        raise ValueError(f"runtime.report_to: {', '.join(names)}: none stands alone; leave it out")
    if runtime.tracker_mode not in TRACKER_MODES:
        raise ValueError(f"runtime.tracker_mode: {runtime.tracker_mode!r} is unknown; choose one of {', '.join(TRACKER_MODES)}")
    if runtime.peak_tflops is not None and runtime.peak_tflops <= 0:
        raise ValueError(f"runtime.peak_tflops: must be above 0 or null, is {runtime.peak_tflops}")


def compose(name: str, overrides: list[str], config_dir: Path = CONFIG_DIR) -> DictConfig:
    """The complete, checked configuration `name` of `config_dir`; the groups of config/ are always in reach."""
    if config_dir.resolve() != CONFIG_DIR:
        overrides = [f"hydra.searchpath=[file://{CONFIG_DIR}]", *overrides]
    with initialize_config_dir(str(config_dir.resolve()), version_base="1.3"):
        config = hydra_compose(name, overrides=overrides)
    name_target(config.recipe)
    for section in ("recipe", "runtime", "build"):
        OmegaConf.to_container(config[section], resolve=True, throw_on_missing=True)
    check_recipe(config.recipe)
    check_runtime(config.runtime)
    OmegaConf.set_readonly(config, True)
    return config


def compose_stage(run: str, variant: str, stage: str) -> DictConfig:
    """One stage of one run's variant, as the workflow trains it."""
    return compose("train", [f"run={run}", f"variant={variant}", f"stage={stage}"])


def name_target(recipe: DictConfig) -> None:
    """Family and method say the published class, where there is one, as `_target_`; that alone may be given too.

    Raises ValueError when the two contradict each other, or neither is given.
    """
    model, name = recipe.model, recipe.method.name
    if model._target_ is not None:
        method, family = methods.of_target(model._target_)
        if method != name:
            raise ValueError(
                f"recipe.model._target_: {model._target_} is of the method {method}, recipe.method.name is {name}; "
                f"give recipe.model.family={family} in its place"
            )
        if model.family not in (None, family):
            raise ValueError(
                f"recipe.model.family: {model.family}, but recipe.model._target_ is of {family}; give one of the two"
            )
        model.family = None
        return
    if model.family not in FAMILIES:
        raise ValueError(f"recipe.model.family: {model.family!r} is unknown; choose one of {', '.join(FAMILIES)}")
    if model.family in methods.settings_of(name).TARGETS:
        model._target_, model.family = methods.settings_of(name).TARGETS[model.family], None


def plain(section: Any) -> dict[str, Any]:
    """A typed section as a dictionary, resolved, less the later fields that stand at their defaults.

    A recipe whose `_target_` says the method says it in no other place.
    """
    schema, values = OmegaConf.get_type(section), {}
    assert schema is not None
    for each in fields(schema):
        value = section[each.name]
        if isinstance(value, DictConfig) and is_dataclass(OmegaConf.get_type(value)):
            value = plain(value)
        elif OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
        if not (each.metadata.get("later") and value == each.default):
            values[each.name] = value
    if schema is Recipe and "_target_" in values["model"] and section.method == method_default(section.method.name):
        del values["method"]
    return values


def method_default(name: str) -> DictConfig:
    """The section recipe.method of a method that nobody changed."""
    return OmegaConf.structured(methods.settings_of(name).Method)


def recipe_schema(content: Any) -> DictConfig:
    """The typed recipe that a frozen one's content fits into: its method's."""
    target = OmegaConf.select(content, "model._target_")
    name = OmegaConf.select(content, "method.name") or (methods.of_target(target)[0] if target else None)
    if name is None:
        raise ValueError("names neither recipe.method.name nor recipe.model._target_")
    schema, settings = OmegaConf.structured(Recipe), methods.settings_of(name)
    schema.method, schema.draft = OmegaConf.structured(settings.Method), OmegaConf.structured(settings.Draft)
    return schema


def to_yaml(section: Any) -> str:
    """Canonical YAML: resolved and key-sorted, so equal configurations are equal text."""
    return OmegaConf.to_yaml(OmegaConf.create(plain(section)), sort_keys=True)


def load(path: Path, schema: type) -> Any:
    """Read a frozen section back, typed by its dataclass. Raises ValueError with the file's name for what does not fit."""
    try:
        content = OmegaConf.load(path)
    except Exception as error:
        raise ValueError(f"{path}: {error}") from error
    return typed(content, schema, path)


def typed(content: Any, schema: type, source: Path) -> Any:
    """A frozen section's content, typed by its dataclass. Raises ValueError with the source's name for what does not fit."""
    try:
        content = OmegaConf.create(content)
        section = OmegaConf.merge(recipe_schema(content) if schema is Recipe else OmegaConf.structured(schema), content)
        OmegaConf.to_container(section, throw_on_missing=True)
    except Exception as error:
        raise ValueError(f"{source}: not a {schema.__name__.lower()} of this version: {error}") from error
    OmegaConf.set_readonly(section, True)
    return section


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """The keys in which two nested dictionaries differ, each as 'key: old -> new'."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        left, right = old.get(key), new.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            lines += differences(left, right, f"{prefix}{key}.")
        elif left != right:
            lines.append(f"{prefix}{key}: {left} -> {right}")
    return lines
