"""The jobs that decode with a target, evaluations and answers: on how many ranks, each with a GPU.

The fewest ranks on which the target's weights leave enough of each GPU for all else: cache, logits, draft. All drafters of a
run are measured on as many, so that their times can be compared.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspec.answers.settings import ENDPOINT
from longspec.engines import OURS
from longspec.families import UNSPLIT, WHOLE_HEADS
from longspec.models.model_folder import INDEX, weight_files
from longspec.workflow import paths
from longspec.workflow.answers import AnswersPlan
from longspec.workflow.jobs.resources import GPUS, check_ranks, gpus_in, number_in, with_gpus
from longspec.workflow.plan import Plan
from longspec.workflow.settings.targets import folder_of, settings_of

WEIGHTS_SHARE = 0.6  # of a GPU's memory: a 32B target in bf16 takes two GPUs of 80 GB and reads prompts of 32k tokens there
STORED_IN = {"float32": 4, "float64": 8}  # bytes of an element by config.json's dtype; those of the others have two


@dataclass(frozen=True)
class Target:
    """weights: how many there are; heads: the key of config.json whose heads ranks share; number: of these, 1 if none are."""

    weights: int
    heads: str
    number: int

    def fitting(self, most: int) -> list[int]:
        """Return the numbers of ranks, up to `most`, that the target can be split over."""
        return [ranks for ranks in range(1, most + 1) if self.number % ranks == 0]


def read_target(folder: Path) -> Target | None:
    """Return a target's figures; None where it is not there, or not whole."""
    config = settings_of(folder)
    if config is None or "num_attention_heads" not in config:
        return None
    try:
        files = [name for name in weight_files(folder) if not name.endswith(INDEX)]
    except ValueError:  # its own job tells what is wrong
        return None
    kind, of_all = config.get("model_type"), config["num_attention_heads"]
    heads = "num_attention_heads" if kind in WHOLE_HEADS else "num_key_value_heads"
    number = 1 if kind in UNSPLIT else config.get(heads) or of_all
    stored_in = STORED_IN.get(str(config.get("dtype") or config.get("torch_dtype")), 2)
    return Target(sum((folder / name).stat().st_size for name in files) // stored_in, heads, number)


@dataclass(frozen=True)
class Machine:
    """The GPUs that a rule's jobs may have."""

    rule: str
    gpus: int = 0  # of a node; 0 where the profile tells none
    gres: str = ""  # a job's own, as the profile has it; "" for as many as there are ranks
    node_gres: str = ""  # a whole node's, which tells their type
    gpu_mem: int = 0  # MB of each; 0: unknown
    ranks: int = 0  # by hand; 0: by the weights

    def asked(self, ranks: int) -> str:
        """Return the GPUs that a job of so many ranks asks Slurm for; "" where the profile has none."""
        if self.gres or not self.node_gres:
            return self.gres
        named = GPUS.search(self.node_gres)
        return with_gpus(named[0] if named else "gpu", ranks)


def machine_of(rule: str, block: Mapping[str, str], training: Mapping[str, str]) -> Machine:
    """Return the machine of a rule by its block of set-resources, and that of `train`, which has a whole node's GPUs.

    Raises ValueError for a number that is none, and for more ranks than GPUs.
    """
    gres, node = (each.get("gres", "").strip("'\"") for each in (block, training))
    ranks = number_in(rule, block, "ranks")
    check_ranks(rule, ranks, rule if gres else "train", gres or node)
    return Machine(rule, gpus_in(gres or node), gres, node, number_in(rule, block, "gpu_mem"), ranks)


def ranks_of(what: str, target: Target | None, element: int, machine: Machine) -> int:
    """Return the fewest ranks that hold a target; one where its size or a GPU's memory is not known.

    what: is decoded, for messages; element: bytes of a weight. Raises ValueError for ranks that cannot share the target's
    heads, and where no number of a node's GPUs holds it.
    """
    if target is None:
        return machine.ranks or 1
    if machine.ranks:
        if machine.ranks not in target.fitting(machine.ranks):
            raise ValueError(
                f"set-resources: {machine.rule}: ranks: {machine.ranks}: {what}: the target has {target.number} "
                f"{target.heads} to share; give one of {', '.join(map(str, target.fitting(target.number)))}"
            )
        return machine.ranks
    size, room = target.weights * element, WEIGHTS_SHARE * machine.gpu_mem * 10**6
    fitting = target.fitting(max(1, machine.gpus))
    found = next((ranks for ranks in fitting if not machine.gpu_mem or size <= ranks * room), None)
    if found is None:
        raise ValueError(
            f"{what}: the target's weights take {size / 1e9:.0f} GB; set-resources: {machine.rule}: gpu_mem: "
            f"{machine.gpu_mem} MB leaves room for {room / 1e9:.0f} GB of them on each of at most {fitting[-1]} GPUs "
            f"({target.number} {target.heads}, {machine.gpus} GPUs a node); or set ranks of {machine.rule} in "
            "profiles/slurm/profile.yaml"
        )
    return found


class DecodingJobs:
    """What the rules ask of the jobs that decode with a target. `warn` is told what a person should know, once.

    rule: `evaluate`, or `evaluate_bench` for what a run measures apart, of a run; or `answer`, of a target and a dataset.
    """

    def __init__(
        self, plan: Plan, bench: Plan, answers: AnswersPlan, machines: Mapping[str, Machine], warn: Callable[[str], None]
    ) -> None:
        self.plan, self.answers, self.machines, self.warn = plan, answers, machines, warn
        self.plans = {"evaluate": plan, "evaluate_bench": bench}
        self.told: set[str] = set()

    def judge(self, rule: str, run: str = "", variant: str = "", drafter: str = "", model: str = "", dataset: str = "") -> None:
        """Raise ValueError for a job still to be done, whose target no number of ranks holds, or the chosen one cannot share.

        A target that is not there yet is judged when it is.
        """
        if rule == "answer":
            made = self.answers.records(model, dataset)
        else:
            made = self.plans[rule].evaluated.format(run=run, variant=variant, drafter=drafter)
        if not Path(made).is_file():
            self._ranks(rule, run, model, dataset)

    def ranks(self, rule: str, run: str = "", model: str = "", dataset: str = "") -> int:
        """Return the ranks of each job; the most, with a warning, where a target that came while jobs run has none."""
        try:
            return self._ranks(rule, run, model, dataset)
        except ValueError as error:
            if str(error) not in self.told:
                self.told.add(str(error))
                self.warn(str(error))
            return self.machines[rule].ranks or max(1, self.machines[rule].gpus)

    def gpus(self, rule: str, run: str = "", model: str = "", dataset: str = "") -> str:
        """Return their GPUs, in Slurm's words; "" to ask a server."""
        if rule == "answer" and dataset not in self.answers.computed:
            return ""
        return self.machines[rule].asked(self.ranks(rule, run, model, dataset))

    def _ranks(self, rule: str, run: str, model: str, dataset: str) -> int:
        machine = self.machines[rule]
        if rule == "answer":
            settings = self.answers.chosen[dataset]
            if settings.engine == ENDPOINT:  # it asks a server, or starts one
                return 1
            what, config, precision = f"answers by {model} to {dataset}", self.plan.models[model], settings.precision
        else:
            what, section = f"run '{run}': {rule}", self.plans[rule].evaluation_of[run].section
            if (engine := section.get("engine", OURS)) != OURS:
                if machine.ranks > 1:
                    raise ValueError(
                        f"set-resources: {rule}: ranks: {machine.ranks}: {what}: evaluation.engine: {engine} is one process; "
                        f"remove ranks, or take evaluation.engine: {OURS}"
                    )
                return 1
            config = self.plan.configs_of(run, None)[0]
            precision = section.get("precision") or config.recipe.precision
        return ranks_of(what, _target(config, machine), 4 if precision == "fp32" else 2, machine)  # auto: bfloat16 on a GPU


def _target(config: Any, machine: Machine) -> Target | None:
    """Return the target of a stage's configuration, if it is there, and if anything is to be judged by it."""
    model = config.recipe.model
    manifest = Path(paths.TARGET.format(model=model.name))
    folder = folder_of(model.source, manifest.parent / "target")
    is_made_here = folder == manifest.parent / "target"
    is_judged = machine.ranks or machine.gpu_mem
    return read_target(folder) if is_judged and not (is_made_here and not manifest.is_file()) else None
