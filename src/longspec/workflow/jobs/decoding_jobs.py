"""The jobs that decode with a target, evaluations and answers: what each decodes at most, and on how many ranks.

All drafters of a run are measured on as many, so that their times can be compared.
"""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from longspec import methods
from longspec.answers.settings import BATCH_TOKENS, ENDPOINT, Regenerate
from longspec.engines import OURS
from longspec.families import position_limit
from longspec.measure.tasks import ROOM, HeldOut, parse
from longspec.workflow import paths
from longspec.workflow.answers import AnswersPlan
from longspec.workflow.jobs.decoding_ranks import Decoding, Machine, Target, ranks_of, read_target
from longspec.workflow.plan import Plan
from longspec.workflow.settings.evaluations import RunEvaluation
from longspec.workflow.settings.targets import folder_of


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
        if rule != "answer":
            return self._of_run(rule, run)
        settings, machine = self.answers.chosen[dataset], self.machines[rule]
        if settings.engine == ENDPOINT:  # it asks a server, or starts one
            return 1
        target = _target(self.plan.models[model], machine)
        decodings = [] if target is None else [_answered(settings, target)]
        return ranks_of(f"answers by {model} to {dataset}", target, decodings, machine)

    def _of_run(self, rule: str, run: str) -> int:
        plan, machine, what = self.plans[rule], self.machines[rule], f"run '{run}': {rule}"
        evaluation = plan.evaluation_of[run]
        if (engine := evaluation.section.get("engine", OURS)) != OURS:
            if machine.ranks > 1:
                raise ValueError(
                    f"set-resources: {rule}: ranks: {machine.ranks}: {what}: evaluation.engine: {engine} is one process; "
                    f"remove ranks, or take evaluation.engine: {OURS}"
                )
            return 1
        configs = plan.configs_of(run, None)
        target = _target(configs[0], machine)
        decodings = [] if target is None else [_evaluated(evaluation, config.recipe, target) for config in configs]
        return ranks_of(what, target, decodings, machine)


def _target(config: Any, machine: Machine) -> Target | None:
    """The target of a stage's configuration, if it is there, and if anything is to be judged by it."""
    if not machine.ranks and not machine.gpu_mem:
        return None
    model = config.recipe.model
    manifest = Path(paths.TARGET.format(model=model.name))
    made = manifest.parent / "target"
    folder = folder_of(model.source, made)
    config_json = folder / "config.json"
    age = config_json.stat().st_mtime_ns if config_json.is_file() else 0
    return None if folder == made and not manifest.is_file() else _read(folder, age)


@cache
def _read(folder: Path, age: int) -> Target | None:
    return read_target(folder)


def _evaluated(evaluation: RunEvaluation, recipe: Any, target: Target) -> Decoding:
    """The longest prompt of a run's tasks, decoded with a draft of this recipe. Prompts without a bound have the target's."""
    section, size, positions = parse(evaluation.section), target.config.vocab_size, position_limit(target.config)
    nodes = 1 + max(each.shape if isinstance(each.shape, int) else sum(each.shape) for each in section.settings)
    nodes += section.with_lookup or 0
    prompts = []
    for task in section.tasks.values():
        longest = task.context[1] if isinstance(task, HeldOut) else task.longest
        prompts.append(min(longest or positions, positions - task.new_tokens))
    texts = [prompt + task.new_tokens for prompt, task in zip(prompts, section.tasks.values(), strict=True)]
    proposed = methods.vocabulary_size(recipe) or evaluation.section.get("draft_vocabulary")
    has_head = methods.has_own_vocabulary(recipe.method.name) or proposed is not None
    layer = methods.settings_of(recipe.method.name).layer_weights(target.config, recipe.method)
    head, projection = (proposed or size) if has_head else 0, 3 * target.config.hidden_size
    return Decoding(
        tokens=max(texts) + ROOM + nodes,
        forward=max(prompts),
        logits=max(task.new_tokens for task in section.tasks.values()),
        nodes=nodes,
        draft=layer + (head + projection) * target.config.hidden_size,
        element=_element(section.precision or recipe.precision),
    )


def _answered(settings: Regenerate, target: Target) -> Decoding:
    """The largest batch. One of several rows has a mask; longer prompts are answered by themselves, without one."""
    new = settings.new_tokens
    prompt = settings.longest_prompt or position_limit(target.config) - new
    side_by_side = max(0, min(prompt, BATCH_TOKENS // 2 - new))
    rows = min(settings.batch, BATCH_TOKENS // (side_by_side + new))
    return Decoding(
        tokens=max(prompt + new, min(settings.batch * (prompt + new), BATCH_TOKENS)),
        forward=max(prompt, min(settings.batch * prompt, BATCH_TOKENS)),
        masked=rows * side_by_side**2 if rows > 1 else 0,
        nodes=settings.batch,
        element=_element(settings.precision),
    )


def _element(precision: str) -> int:
    """Bytes of an element on a GPU; `auto` is bfloat16 there."""
    return 4 if precision == "fp32" else 2
