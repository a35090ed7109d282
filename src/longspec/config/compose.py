"""Hydra: from names of files in config/ to one checked configuration."""

import re
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from longspec import methods
from longspec.config import yaml_files
from longspec.config.checks import CHECKS, check_optimizer, name_class
from longspec.config.explain import did_you_mean, unknown_key
from longspec.config.faults import one_line
from longspec.config.run_file import CONFIG_DIR, Run, read_run
from longspec.config.run_implied import numbers_of, stage_of, target_of, variants_of, with_implied
from longspec.config.schema import Build, Config, Recipe, Runtime

RUN, DEFAULT_RUN = "run", "published"  # an override that names a run, or a run's file; the run where there is none
NODE, STAGE_NODE = "run_file", "run_file_stage"  # of Hydra's groups; names of train.yaml
# Exceptions while Hydra composes, for a file that cannot be read or a key that does not fit.
REFUSED = (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError)
# Exceptions that a mistake in a configuration raises.
ConfigError = (ValueError, HydraException, OmegaConfBaseException)


@cache
def _store_schemas() -> None:
    """Tell Hydra the typed sections; those of a method's own are the group `method_schema`."""
    store = ConfigStore.instance()
    store.store("schema", Config)
    for name in methods.names():
        settings = methods.settings_of(name)
        store.store(name, {"recipe": {"method": settings.Method, "draft": settings.Draft}}, "method_schema", "_global_")


def compose(name: str, overrides: list[str], config_dir: Path = CONFIG_DIR) -> DictConfig:
    """The complete, checked configuration `name` of `config_dir`; the groups of config/ are always in reach.

    Raises ValueError with the key, and the file where one is at fault.
    """
    for override in overrides:
        if re.match(r"[+~]*hydra[./@=]", override):
            raise ValueError(f"{override}: Hydra's own settings have no effect here; remove it (files.out=... is the folder)")
    config = _composed(name, overrides, config_dir)
    _refuse_added(config)
    name_class(config.recipe)
    try:
        for section in ("recipe", "runtime", "build"):
            OmegaConf.to_container(config[section], resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ValueError(one_line(error)) from error
    for schema, section in ((Recipe, config.recipe), (Runtime, config.runtime), (Build, config.build)):
        CHECKS[schema](section)
    check_optimizer(config.recipe, config.runtime)
    OmegaConf.set_readonly(config, True)
    return config


def _composed(name: str, overrides: list[str], config_dir: Path) -> DictConfig:
    """Returns the config that the files and overrides give; its values are not checked."""
    _store_schemas()
    folders = list(dict.fromkeys([config_dir.resolve(), CONFIG_DIR]))
    # Finding the files composed takes as long as composing them: only where one in reach may have Hydra's own settings.
    in_reach = [path for folder in folders for path in folder.rglob("*.yaml") if path.is_file()]
    run, overrides = _told_by_run(overrides, folders)
    first, *others = sorted(folders, key=lambda folder: not (folder / f"{name}.yaml").is_file())
    if others:
        overrides = [f"hydra.searchpath=[file://{others[0]}]", *overrides]
    try:
        with initialize_config_dir(str(first), version_base="1.3"):
            config = hydra_compose(name, overrides=overrides)
            files = _files(name, overrides, folders) if any(b"hydra" in path.read_bytes() for path in in_reach) else []
    except REFUSED as error:
        if isinstance(error, MissingConfigException) and error.missing_cfg_file == name:
            known = [path.stem for path in config_dir.glob("[!_]*.yaml")]
            raise ValueError(f"{config_dir}: has no file {name}.yaml; {did_you_mean(name, known)}") from error
        if isinstance(error, yaml.YAMLError | UnicodeDecodeError):
            for path in sorted(in_reach):
                yaml_files.read(path)  # the one at fault raises, with its name and the line
        raise ValueError(_with_file(one_line(error), run)) from error
    for path in files:  # Hydra composes here and does nothing else, so its own settings would be dropped without a word
        content = yaml_files.read(path)
        if isinstance(content, dict) and "hydra" in content:
            raise ValueError(f"{path}: hydra: Hydra's own settings have no effect here; remove the key")
    return config


def _with_file(message: str, run: Run) -> str:
    """A message of Hydra's with the run's file in the place of the node that it was told as."""
    node, end = rf"\b{NODE}/{re.escape(run.name)}", r"(?:\.yaml)?(?=[\)':\s])"
    message = re.sub(
        node.replace(NODE, STAGE_NODE) + rf"_([\w.-]+?){end}", lambda found: f"{run.file}, stage {found[1]}", message
    )
    return re.sub(node + end, lambda _: run.file, message)


def _told_by_run(overrides: list[str], folders: list[Path]) -> tuple[Run, list[str]]:
    """The run, and the overrides with its choice taken out: its file Hydra is told as nodes of its own.

    In the node of a run stand its target, method and sharing, and what it sets; the node of a stage has its own numbers.
    """
    chosen = dict(override.split("=", 1) for override in overrides if "=" in override)
    run = read_run(chosen.get(RUN, DEFAULT_RUN), folders)
    says, store = run.says, ConfigStore.instance()
    for group in (NODE, STAGE_NODE):  # of a run that was composed before
        store.repo.pop(group, None)
    facts, model = target_of(run, folders)
    groups = {"model": says.target if model is None else None, "method": says.method, "deepspeed": says.deepspeed}
    groups["variant"] = next(iter(variants_of(run)), None)
    defaults = [{f"override /{group}": name} for group, name in groups.items() if name is not None]
    sections = {"recipe": with_implied(run, facts, model), "runtime": says.runtime, "build": says.build}
    store.store(run.name, {"defaults": [*defaults, "_self_"], **sections}, NODE, "_global_")
    for name in says.stages:
        store.store(f"{run.name}_{name}", stage_of(run, name, facts, folders), STAGE_NODE, "_global_")
    others = [override for override in overrides if not override.startswith(f"{RUN}=")]
    named = chosen.get("stage", "")
    if named in says.stages:
        others = [override for override in others if not override.startswith("stage=")]
        others += [f"stage={numbers_of(run, named, folders)}", f"{STAGE_NODE}={run.name}_{named}"]
    return run, [f"{NODE}={run.name}", *others]


def _refuse_added(section: DictConfig, place: str = "") -> None:
    """Raise ValueError for a key that no section has: `+key=value` adds any, and nothing would read it."""
    schema = OmegaConf.get_type(section)
    for key in map(str, section):
        if is_dataclass(schema) and key not in {field.name for field in fields(schema)}:
            raise ValueError(f"{place}{key}: {unknown_key(key, [field.name for field in fields(schema)])}")
        below = section._get_node(key)
        if isinstance(below, DictConfig) and not (below._is_none() or below._is_missing()):
            _refuse_added(below, f"{place}{key}.")


def _files(name: str, overrides: list[str], folders: list[Path]) -> list[Path]:
    """The files that a configuration is composed from."""
    defaults = GlobalHydra.instance().config_loader().compute_defaults_list(name, overrides, RunMode.RUN).defaults
    places = [folder / f"{default.config_path}.yaml" for default in defaults for folder in folders]
    return [path for path in places if path.is_file()]


def stages_of(run: str, config_dir: Path = CONFIG_DIR) -> list[str]:
    """The stages of a run, in order. Raises ValueError for a file that says none, or none there."""
    return list(read_run(run, [config_dir, CONFIG_DIR]).says.stages)


def compose_stage(run: str, variant: str, stage: str, config_dir: Path = CONFIG_DIR) -> DictConfig:
    """One stage of one run's variant, as the workflow trains it."""
    return compose("train", [f"run={run}", f"variant={variant}", f"stage={stage}"], config_dir)
