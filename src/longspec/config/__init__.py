"""The configuration: Hydra composes it, dataclasses type it, canonical YAML freezes it.

Snakemake imports this room: no torch here.
"""

from longspec.config.checks import (
    ATTENTION,
    CHOICES,
    LINEAR,
    MUON,
    OFFLINE,
    OFFLOADS,
    PARTITIONED,
    REPLICATED,
    TENSOR_PARALLEL,
    TRACKERS,
    check_optimizer,
    check_trackers,
)
from longspec.config.compose import CONFIG_DIR, ConfigError, compose, compose_stage, stages_and_variants, stages_of
from longspec.config.frozen import differences, load, plain, to_yaml, typed
from longspec.config.schema import LATER, Build, Config, Data, DeepSpeed, Files, Model, Optimizer, Recipe, Runtime, States

__all__ = [
    "ATTENTION",
    "CHOICES",
    "CONFIG_DIR",
    "LATER",
    "LINEAR",
    "MUON",
    "OFFLINE",
    "OFFLOADS",
    "PARTITIONED",
    "REPLICATED",
    "TENSOR_PARALLEL",
    "TRACKERS",
    "Build",
    "Config",
    "ConfigError",
    "Data",
    "DeepSpeed",
    "Files",
    "Model",
    "Optimizer",
    "Recipe",
    "Runtime",
    "States",
    "check_optimizer",
    "check_trackers",
    "compose",
    "compose_stage",
    "differences",
    "load",
    "plain",
    "stages_and_variants",
    "stages_of",
    "to_yaml",
    "typed",
]
