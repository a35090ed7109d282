"""Hydra: from names of files in config/ to one checked configuration."""

import copy
import re
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from longspec import methods
from longspec.atomic_files import sha256_text
from longspec.config import yaml_files
from longspec.config.checks import CHECKS, check_optimizer, name_class
from longspec.config.faults import one_line, unknown_key
from longspec.config.run_file import CONFIG_DIR, Run, numbers_of, read_run, stage_of, target_of, variants_of, with_implied
from longspec.config.schema import Build, Recipe, Runtime, mix_of
from longspec.config.typed import OF_STAGE

RUN, DEFAULT_RUN = "run", "published"  # the override that names a run or a run's file, and the run without one
NODE, STAGE_NODE = "run_file", "run_file_stage"  # groups of Hydra, named in train.yaml
COMPOSED: dict[str, DictConfig] = {}  # in this process, by all that Hydra reads, since each one takes 0.2 s
NO_EFFECT = "Hydra's own settings have no effect here; remove it (files.out=... is the folder)"


@dataclass
class Files:
    """Say where the trainer started by hand finds and leaves things. They are no part of the frozen configuration."""

    target: str = MISSING
    data: Any = MISSING  # a path; for a stage that mixes data sets a list of them, sorted by the sets' names
    init_weights: str | None = None
    vocabulary: str | None = None  # draft_vocabulary_{size}.json, if recipe.method.vocabulary is a number
    states: Any = None  # a list of every shard.json of stored states, if recipe.states.source is offline
    replay: dict[str, str] = field(default_factory=dict)  # manifests of packed rows by the stages of recipe.data.replay
    out: str = MISSING


@dataclass
class Config:
    """Hold all sections of one stage's configuration."""

    recipe: Recipe = field(default_factory=Recipe)
    runtime: Runtime = field(default_factory=Runtime)
    build: Build = field(default_factory=Build)
    files: Files = field(default_factory=Files)


@cache
def _store_schemas() -> None:
    """Register the typed sections with Hydra; those of the methods form the group `method_schema`."""
    store = ConfigStore.instance()
    store.store("schema", Config)
    for name in methods.names():
        settings = methods.settings_of(name)
        store.store(name, {"recipe": {"method": settings.Method, "draft": settings.Draft}}, "method_schema", "_global_")


def compose(name: str, overrides: list[str], config_dir: Path = CONFIG_DIR) -> DictConfig:
    """Return the complete, checked configuration `name` of `config_dir`, which may always use the groups of config/.

    Raises ValueError with the key, and with the file if one is at fault.
    """
    for override in overrides:
        if re.match(r"[+~]*hydra[./@=]", override):
            raise ValueError(f"{override}: {NO_EFFECT}")
    config = _composed(name, overrides, config_dir)
    for prefix, section, kind in (("", config, Config), ("files.", config.files, Files)):
        known = [field.name for field in fields(kind)]
        for key in map(str, section):
            if key not in known:  # `+key=value` adds any, and nothing would read it; CHECKS look at the other sections
                raise ValueError(f"{prefix}{key}: {unknown_key(key, known)}")
    name_class(config.recipe)
    try:
        for section in (config.recipe, config.runtime, config.build):
            OmegaConf.to_container(section, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ValueError(one_line(error)) from error
    for schema, section in ((Recipe, config.recipe), (Runtime, config.runtime), (Build, config.build)):
        CHECKS[schema](section)
    check_optimizer(config.recipe, config.runtime)
    OmegaConf.set_readonly(config, True)
    return config


def _composed(name: str, overrides: list[str], config_dir: Path) -> DictConfig:
    """Return the configuration that files and overrides give; its values are not checked."""
    _store_schemas()
    folders = list(dict.fromkeys([config_dir.resolve(), CONFIG_DIR]))
    found = (
        (folder, path) for folder in folders for pattern in ("*.yaml", "*/*.yaml") for path in sorted(folder.glob(pattern))
    )
    in_reach = [(folder, path) for folder, path in found if path.is_file()]
    run, overrides = _told_by_run(overrides, folders)
    first, *others = sorted(folders, key=lambda folder: not (folder / f"{name}.yaml").is_file())
    files = [(folders.index(folder), path.relative_to(folder), path.read_bytes()) for folder, path in in_reach]
    for (_, path), (*_, content) in zip(in_reach, files, strict=True):
        if re.search(rb"^hydra\s*:", content, re.MULTILINE):  # Hydra would drop it without a word
            raise ValueError(f"{path}: hydra: {NO_EFFECT}")
    nodes = [ConfigStore.instance().repo.get(group) for group in (NODE, STAGE_NODE)]
    key = sha256_text(repr((name, overrides, files, nodes)))
    if key not in COMPOSED:
        searched = [f"hydra.searchpath=['file://{others[0]}']"] if others else []
        try:
            with initialize_config_dir(str(first), version_base="1.3"):
                COMPOSED[key] = hydra_compose(name, overrides=[*searched, *overrides])
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
            for _, path in in_reach if isinstance(error, yaml.YAMLError | UnicodeDecodeError) else ():
                yaml_files.read(path)  # the file at fault raises, with its name and the line
            raise ValueError(_with_file(one_line(error), run)) from error
    return copy.deepcopy(COMPOSED[key])


def _with_file(message: str, run: Run) -> str:
    """Return a message of Hydra's with the run's file in place of the node that stood for it."""
    node, end = rf"\b{NODE}/{re.escape(run.name)}", r"(?:\.yaml)?(?=[\)':\s])"
    message = re.sub(
        node.replace(NODE, STAGE_NODE) + rf"_([\w.-]+?){end}", lambda found: f"{run.file}, stage {found[1]}", message
    )
    return re.sub(node + end, lambda _: run.file, message)


def _told_by_run(overrides: list[str], folders: list[Path]) -> tuple[Run, list[str]]:
    """Return the run, and the overrides without its name: Hydra gets the run's file as nodes of its own.

    A run's node holds its target, method and sharing, and what it sets; a stage's node holds the stage's own numbers.
    """
    chosen = dict(override.split("=", 1) for override in overrides if "=" in override)
    run = read_run(chosen.get(RUN, DEFAULT_RUN), folders)
    says, store = run.says, ConfigStore.instance()
    for group in (NODE, STAGE_NODE):  # of a run that was composed earlier
        store.repo.pop(group, None)
    facts, model = target_of(run, folders)
    nodes = {name: stage_of(run, name, facts, folders) for name in says.stages}
    named, recipe = chosen.get("stage", ""), with_implied(run, facts, model)
    own = nodes[named]["recipe"]["data"] if named in nodes else {}
    recipe["data"] = {key: value for key, value in recipe.get("data", {}).items() if key not in own}  # Hydra joins mixes
    groups = {"model": says.target if model is None else None, "method": says.method, "deepspeed": says.deepspeed}
    groups["variant"] = next(iter(variants_of(run)), None)
    defaults = [{f"override /{group}": name} for group, name in groups.items() if name is not None]
    sections = {"recipe": recipe, "runtime": says.runtime, "build": says.build}
    store.store(run.name, {"defaults": [*defaults, "_self_"], **sections}, NODE, "_global_")
    for name, node in nodes.items():
        store.store(f"{run.name}_{name}", node, STAGE_NODE, "_global_")
    others = [override for override in overrides if not override.startswith(f"{RUN}=")]
    if named in says.stages:
        others = [override for override in others if not override.startswith("stage=")]
        others += [f"stage={numbers_of(run, named, folders)}", f"{STAGE_NODE}={run.name}_{named}"]
    return run, [f"{NODE}='{run.name}'", *others]  # in quotes: a name may read like a number


def stages_of(run: str, config_dir: Path = CONFIG_DIR) -> list[str]:
    """Return the stages of a run, in order. Raises ValueError if there is no such run, or if its file is wrong."""
    return list(read_run(run, [config_dir, CONFIG_DIR]).says.stages)


def compose_stage(run: str, variant: str, stage: str, config_dir: Path = CONFIG_DIR) -> DictConfig:
    """Return one stage of a run's variant as the workflow trains it. A replayed mix becomes its data sets with their shares."""

    def composed(name: str) -> DictConfig:
        return compose("train", [f"run={run}", f"variant='{variant}'", f"stage={name}"], config_dir)

    config, known, replay = composed(stage), stages_of(run, config_dir), dict[str, float]()
    for name, share in config.recipe.data.replay.items():
        mix = mix_of(composed(name).recipe.data.name if name in known else name)
        for dataset, part in mix.items():
            each, of_all = (name, share) if len(mix) == 1 else (f"{name}{OF_STAGE}{dataset}", round(share * part, 9))
            replay[each] = replay.get(each, 0) + of_all
    OmegaConf.set_readonly(config, False)
    config.recipe.data.replay = replay
    OmegaConf.set_readonly(config, True)
    return config
