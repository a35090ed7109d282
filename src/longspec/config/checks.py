"""Check what must fit together in a section, beyond types and ranges. Each check raises ValueError with the key."""

import math
import re
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig

from longspec import methods
from longspec.config.faults import check, faults_in, shown
from longspec.config.names import (
    GGUF_SUFFIX,
    HUB_PREFIX,
    WHEEL_FORM,
    WHEEL_PREFIX,
    hub_source,
    is_gguf,
    is_repository,
    wheel_source,
)
from longspec.config.schema import MUON, OFFLINE, Build, Recipe, Runtime, States
from longspec.config.typed import Mix
from longspec.families import FAMILIES

BUILT = "build"  # the source of a target that the workflow makes
SOURCES = f"{BUILT}, {HUB_PREFIX}<owner>/<repository>, the folder of a transformers model, a {GGUF_SUFFIX} file or {WHEEL_FORM}"


def check_model(model: DictConfig) -> None:
    """Check a target's source and hash. workflow.settings.targets checks whether a folder is there."""
    source, sha256 = model.source, model.sha256
    named = source.startswith(HUB_PREFIX) and is_repository(source.removeprefix(HUB_PREFIX))
    if not source.strip() or "\0" in source or (source.startswith(HUB_PREFIX) and not named):
        raise ValueError(f"recipe.model.source: {source!r} is no target; give {SOURCES}")
    if source.startswith(WHEEL_PREFIX):
        with faults_in("recipe.model.source"):
            wheel_source(source)
        if sha256 is None:  # it checks what an index serves
            raise ValueError(f"recipe.model.sha256: missing; give the SHA-256 of the file in the wheel, {source}")
    if sha256 is not None and not is_gguf(source):
        raise ValueError(f"recipe.model.sha256: is of a {GGUF_SUFFIX} file, but recipe.model.source is {source}; remove it")
    if sha256 is not None and not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise ValueError(f"recipe.model.sha256: {sha256!r} is no SHA-256; give its 64 digits of 0-9 and a-f, as sha256sum does")


def check_class(recipe: DictConfig) -> None:
    """Check that a published class belongs to the recipe's method: no other class is ever called."""
    if recipe.model._target_ is None:
        return
    method, family = methods.of_target(recipe.model._target_)
    if method != recipe.method.name:
        raise ValueError(
            f"recipe.model._target_: {recipe.model._target_} is of the method {method}, recipe.method.name is "
            f"{recipe.method.name}; give recipe.model.family={family} in its place"
        )


def name_class(recipe: DictConfig) -> None:
    """Write the class of method and family, if there is one, as `_target_` in place of the family. `_target_` alone will do.

    Raises ValueError, with the key, for words that are unknown or contradict each other.
    """
    model, name = recipe.model, recipe.method.name
    classes = methods.settings_of(name).TARGETS
    if model._target_ is not None:
        check_class(recipe)
        if model.family is not None and classes.get(model.family) != model._target_:
            raise ValueError(f"recipe.model.family: {model.family}, but recipe.model._target_ is {model._target_}; give one")
        model.family = None
        return
    if model.family not in FAMILIES:
        raise ValueError(
            f"recipe.model.family: {model.family!r} is unknown; choose one of {', '.join(methods.settings_of(name).FAMILIES)}"
        )
    methods.check_drafts_for(name, model.family, "recipe.model.family")
    if model.family in classes:
        model._target_, model.family = classes[model.family], None


def check_recipe(recipe: DictConfig) -> None:
    """Check all of the section that can be checked without data and target."""
    settings = methods.settings_of(recipe.method.name)
    check(Recipe, recipe, "recipe")
    check(settings.Method, recipe.method, "recipe.method")
    check(settings.Draft, recipe.draft, "recipe.draft")
    check_class(recipe)
    check_model(recipe.model)
    if recipe.init is not None and recipe.init.startswith(HUB_PREFIX):
        with faults_in("recipe.init"):
            hub_source(recipe.init)
    settings.check(recipe)
    check_states(recipe)
    check_shares(recipe)


def check_shares(recipe: DictConfig) -> None:
    """Check the shares of data sets and replayed stages. workflow.settings checks whether these exist."""
    key, mix = "recipe.data.name", recipe.data.name
    if not isinstance(mix, str):
        check(Mix, mix, key)
        if not math.isclose(total := sum(mix.values()), 1, abs_tol=0.005):
            raise ValueError(f"{key}: the shares of {', '.join(mix)} are {total:g} together; give shares whose sum is 1")
    key, replay = "recipe.data.replay", recipe.data.replay
    if recipe.stage in replay:
        raise ValueError(f"{key}.{recipe.stage}: is this stage itself; name earlier stages of the run alone")
    if sum(replay.values()) >= 1:
        raise ValueError(
            f"{key}: the shares of {', '.join(replay)} are {sum(replay.values()):g} together; leave some of 1 to the stage's "
            "own data"
        )


def check_states(recipe: DictConfig) -> None:
    """Check that states can be stored, and that none of their keys is without effect."""
    states = recipe.states
    if states.source != OFFLINE:
        for key in ("dtype", "top_k"):
            if states[key] != (default := getattr(States(), key)):
                fix = f"set it to {shown(default)}, or recipe.states.source: {OFFLINE}"
                raise ValueError(f"recipe.states.{key}: {states[key]}: nothing is stored; {fix}")
        return
    if states.top_k is not None and not methods.soft_labels(recipe):
        raise ValueError(
            f"recipe.states.top_k: {states.top_k}: this draft learns the text's tokens, not the target's distribution; set it "
            "to null, or train on soft labels"
        )
    vocabulary = methods.vocabulary_size(recipe)
    if states.top_k is not None and vocabulary is not None and states.top_k > vocabulary:
        raise ValueError(
            f"recipe.states.top_k: {states.top_k} tokens are more than the draft can propose, {vocabulary} "
            "(recipe.method.vocabulary); give as many or fewer"
        )


def check_optimizer(recipe: Any, runtime: Any) -> None:
    """Raise ValueError, with the keys, if DeepSpeed shards what the recipe's optimizer must see whole."""
    stage = runtime.deepspeed.zero_stage
    if recipe.optimizer.name == MUON and stage != 0:
        raise ValueError(
            f"recipe.optimizer.name: {MUON} orthogonalises whole matrices, which ZeRO-{stage} lays end to end and cuts into "
            "shares; set runtime.deepspeed.zero_stage to 0 and offload_optimizer to none, or the name to adamw"
        )


def check_runtime(runtime: DictConfig) -> None:
    """Check all of the section that can be checked without a machine."""
    check(Runtime, runtime, "runtime")
    deepspeed, names = runtime.deepspeed, list(runtime.report_to)
    stage, offload, path = deepspeed.zero_stage, deepspeed.offload_optimizer, deepspeed.nvme_path
    if offload != "none" and stage == 0:
        raise ValueError("runtime.deepspeed.offload_optimizer: ZeRO-0 offloads nothing; set it to none, or zero_stage to 1")
    if offload == "nvme" and stage != 3:
        raise ValueError(f"runtime.deepspeed.offload_optimizer: nvme wants zero_stage 3, which is {stage}; set it to cpu")
    if offload == "nvme" and not path:
        raise ValueError("runtime.deepspeed.nvme_path: offload_optimizer is nvme; name a folder on a fast local disk")
    if offload != "nvme" and path:
        raise ValueError(f"runtime.deepspeed.nvme_path: not used, since offload_optimizer is {offload}; set it to null")
    if "none" in names and len(names) > 1:
        raise ValueError(f"runtime.report_to: {', '.join(names)}: none stands alone; leave it out")


def check_build(build: DictConfig) -> None:
    """Check the section of a target of our own against what a Qwen2 can be."""
    check(Build, build, "build")
    if build.hidden % (2 * build.heads):
        raise ValueError(f"build.hidden: {build.hidden} does not give {build.heads} heads (build.heads) an even width each")
    if build.heads % build.key_value_heads:
        raise ValueError(f"build.key_value_heads: {build.key_value_heads} do not divide {build.heads} heads (build.heads)")
    for number, phase in enumerate(build.mixture):
        if phase.sequence_length > build.max_position:
            raise ValueError(
                f"build.mixture[{number}].sequence_length: {phase.sequence_length} tokens are more than the target's "
                f"{build.max_position} positions (build.max_position)"
            )


CHECKS: dict[type, Callable[[Any], None]] = {Recipe: check_recipe, Runtime: check_runtime, Build: check_build}
