"""The configuration: Hydra composes it, dataclasses type it, canonical YAML freezes it.

Snakemake imports this room: no torch here.
"""

# ruff: noqa: F401  (the names that other rooms ask for)

from longspec.config.checks import check_optimizer
from longspec.config.compose import Config, compose, compose_stage, stages_of
from longspec.config.run_file import CONFIG_DIR
from longspec.config.schema import (
    COLLATIONS,
    LINEAR,
    MUON,
    OFFLINE,
    OVERLONG,
    PARTITIONED,
    REPLICATED,
    TENSOR_PARALLEL,
    Build,
    Model,
    Recipe,
    Runtime,
    States,
    processes_of,
)
from longspec.config.yaml_files import differences, load, plain, to_yaml, typed
