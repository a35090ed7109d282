"""What stages replay of earlier ones (recipe.data.replay): that these stand before them in the run."""

from longspec.config.explain import did_you_mean
from longspec.workflow.choices import Choices


def check_replays(choices: Choices) -> None:
    """Raise ValueError, with the key, for a replayed stage that is none of the run, or no earlier one."""
    for (run, variant, stage), config in choices.configs.items():
        stages = choices.stages[run]
        earlier = stages[: stages.index(stage)]
        for name in config.recipe.data.replay:
            key = f"run '{run}', variant '{variant}', stage '{stage}': recipe.data.replay.{name}"
            if name not in stages:
                raise ValueError(f"{key}: the run has no such stage; name earlier ones; {did_you_mean(name, earlier)}")
            if name not in earlier:
                raise ValueError(f"{key}: comes later in the run; name earlier ones; {did_you_mean(name, earlier)}")
