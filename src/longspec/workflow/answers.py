"""Plan answers by the target itself: whose records are regenerated, where the answers are, who makes them.

A folder of answers has three names, which are wildcards: model, dataset, and answering (the settings that decide the answers).
"""

from longspec.answers import settings as answer_settings
from longspec.answers.settings import parse
from longspec.config.schema import mix_of
from longspec.measure.tasks import HeldOut
from longspec.workflow import paths
from longspec.workflow.choices import Choices
from longspec.workflow.settings.targets import sizes_of

KEY = "regenerate"


class AnswersPlan:
    """Answer the rules' questions about answers. Raises ValueError for settings that conflict, and for unanswerable data."""

    def __init__(self, choices: Choices, *others: Choices) -> None:
        """Take the choices, and others of the same runs that measure more data."""
        self.choices = choices
        used = {name for each in (choices, *others) for name in each.datasets_in_use()}
        self.chosen = {
            name: parse(name, entry[KEY]) for name, entry in choices.data.items() if name in used and entry.get(KEY) is not None
        }
        for name in self.chosen:
            if choices.data[name]["source"] == "stdlib":
                raise ValueError(f"data.{name}.{KEY}: the source stdlib is running text, which asks nothing; remove {KEY}")
            if model := next((each for each in choices.built if name in [p["dataset"] for p in choices.mixture(each)]), None):
                raise ValueError(
                    f"data.{name}.{KEY}: config/model/{model}.yaml trains the target on {name} (build.mixture), which the "
                    f"target itself is to answer; name its answers apart, with the same source: {name}-answers"
                )
        for name in self.asked:
            models = {model for each in (choices, *others) for model, dataset in self.wanted(each) if dataset == name}
            if len(models) > 1:
                raise ValueError(
                    f"data.{name}.{KEY}.endpoint: one server would answer as {' and as '.join(sorted(models))}; choose runs of "
                    f"one of them at a time (--config 'runs=[...]'), or let each job start its target's server: {KEY}.server"
                )
        for model, name in self.wanted(choices):
            config = next(each for each in choices.configs.values() if each.recipe.model.name == model)
            _, _, positions = sizes_of(config)
            if positions is not None:
                answer_settings.room_for_prompts(self.chosen[name], positions, f"data.{name}.{KEY}")

    # Names.

    @property
    def answerings(self) -> list[str]:
        """Return the last part of all folders' names."""
        return sorted({answer_settings.folder_name(each) for each in self.chosen.values()})

    @property
    def asked(self) -> list[str]:
        """Return the datasets answered by a server that already runs: their jobs need no machine of their own."""
        return [name for name, each in self.chosen.items() if each.engine == answer_settings.ENDPOINT and each.server is None]

    @property
    def computed(self) -> list[str]:
        """Return the datasets whose jobs load the target, or start its server."""
        return [name for name in self.chosen if name not in self.asked]

    # Files.

    def records(self, model: str, dataset: str) -> str:
        """Return the manifest of the records that become a target's tokens: its own answers, or the raw records."""
        return f"{self.folder(model, dataset)}/manifest.json" if dataset in self.chosen else paths.RAW.format(dataset=dataset)

    def folder(self, model: str, dataset: str) -> str:
        """Return the folder of a target's answers to a dataset."""
        answering = answer_settings.folder_name(self.chosen[dataset])
        return paths.ANSWERS.format(model=model, dataset=dataset, answering=answering)

    def shards(self, model: str, dataset: str) -> list[str]:
        """Return the manifests of all answer shards: as many as the dataset's token shards."""
        number = self.choices.data[dataset]["shards"]
        return [f"{self.folder(model, dataset)}/{part}-of-{number}/shard.json" for part in range(number)]

    def trained(self, run: str) -> list[str]:
        """Return the manifests of the answers that a run trains on."""
        model = self.choices.model_of(run)
        return [self.records(model, name) for name in sorted(self.choices.trained_on_by(run)) if name in self.chosen]

    def compared_options(self, first: str, second: str) -> list[str]:
        """Return the option with the answers that two runs train on, for their common report."""
        answered = sorted({*self.trained(first), *self.trained(second)})
        return ["--answers", *answered] if answered else []

    def evaluation_options(self, run: str) -> list[str]:
        """Return an evaluation's options for held-out records: each dataset's name with the file its prompts are drawn from."""
        return [f"{name}={path}" for name, path in self._evaluated(run).items()]

    def evaluation_records(self, run: str) -> list[str]:
        """Return the files in evaluation_options."""
        return list(self._evaluated(run).values())

    def _evaluated(self, run: str) -> dict[str, str]:
        """Return, by dataset, the manifest that a run's prompts are drawn from.

        This is the target's answers if the run trains on them, or if a prompt may contain parts of them; else the raw records.
        """
        model, answered = self.choices.model_of(run), {*self.choices.trained_on_by(run), *_read(self.choices, run)}
        return {
            name: self.records(model, name) if name in answered else paths.RAW.format(dataset=name)
            for name in self.choices.evaluation_data(run)
        }

    def wanted(self, choices: Choices) -> list[tuple[str, str]]:
        """Return (target, dataset) for each dataset that a target answers."""
        recipes = [config.recipe for config in choices.configs.values()]
        pairs = [(recipe.model.name, name) for recipe in recipes for name in mix_of(recipe.data.name)]
        pairs += [(choices.model_of(run), name) for run in choices.runs for name in _read(choices, run)]
        return [pair for pair in dict.fromkeys(pairs) if pair[1] in self.chosen]

    # Settings.

    def settings(self, dataset: str) -> str:
        """Return the settings that decide the answers, as canonical JSON."""
        return answer_settings.deciding(self.chosen[dataset])

    def runtime(self, dataset: str) -> str:
        """Return the settings that do not change the answers."""
        return answer_settings.runtime(self.chosen[dataset])


def _read(choices: Choices, run: str) -> list[str]:
    """Return the datasets whose answers may be parts of a run's prompts; whole questions need no answers."""
    measured = choices.evaluation_of.get(run)
    tasks = [] if measured is None else measured.tasks.values()
    return sorted({task.data for task in tasks if isinstance(task, HeldOut) and not task.whole_questions})
