# What the rules share: the plan, and how they ask it. The rules own files and edges, config/ owns numbers, profiles/ owns
# machines.

import inspect
import os
import re
import sys
from contextlib import contextmanager
from pathlib import Path

from snakemake.logging import logger
from snakemake.utils import update_config

from longspec.config import COLLATIONS, OVERLONG
from longspec.engines import ENGINES, OURS
from longspec.workflow import paths
from longspec.workflow.answers import AnswersPlan
from longspec.workflow.checks import bench_of, check_prompts, checked_plan
from longspec.workflow.serves import ServesPlan
from longspec.workflow.settings.workflow_file import check_text, typed_call
from longspec.workflow.states import StatesPlan
from longspec.workflow.unnoticed import unnoticed


@contextmanager
def one_line_errors():
    """End the command with what is wrong. For an exception Snakemake would print its own frames and those of rules/ too."""
    try:
        yield
    except ValueError as error:
        logger.error(str(error))
        sys.exit(1)


# Snakemake must not read a file in which it would take the last of several values, or run text as a template.
with one_line_errors():
    check_text(Path("config/workflow.yaml"))


configfile: "config/workflow.yaml"


# Jobs run the interpreter that runs Snakemake, even if its environment is not activated.
BIN = str(Path(sys.executable).parent)
os.environ.update(PATH=os.pathsep.join([BIN, *os.get_exec_path()]))

# Jobs read only what lies here: compute nodes often have no way to the internet, and a question to the hub would hang. Only
# the rules that fetch, which are local, ask the hub as the user's own environment says.
os.environ.setdefault("FETCH_OFFLINE", os.environ.get("HF_HUB_OFFLINE", "0"))
os.environ.update(HF_HUB_OFFLINE="1")

CALLED = typed_call(workflow.config_settings.config)
update_config(config, CALLED)
with one_line_errors():
    PLAN = checked_plan(config)
    BENCH = bench_of(PLAN)
    ANSWERS = AnswersPlan(PLAN, BENCH)
    STATES = StatesPlan(PLAN)
    BENCH_ANSWERS = AnswersPlan(BENCH)
    SERVES = ServesPlan(PLAN)
    if workflow.is_main_process:  # jobs read this file again
        for each in (PLAN, BENCH):
            check_prompts(each)
        for line in unnoticed(PLAN, BENCH):
            logger.warning(line)
        STATES.forget_copies()

# The plans that answer for a measurement, by the wildcard `measured`, and for its page.
MEASURED = {
    "evaluation": [PLAN, ANSWERS],
    "report": [PLAN],
    "bench": [BENCH, BENCH_ANSWERS],
    "serves": [SERVES, PLAN, ANSWERS],
}

FETCHED = PLAN.fetched_data | BENCH.fetched_data


def of_hub(key, dataset):
    """Return `source` or `revision` of records or prompts from the hub."""
    return FETCHED[dataset][key]


def one_of(names):
    """Return a wildcard's pattern; it matches nothing when there is no name."""
    return "|".join(map(re.escape, dict.fromkeys(names))) or "(?!)"


wildcard_constraints:
    run=one_of(PLAN.files),
    variant=one_of(each for run in PLAN.variants.values() for each in run),
    stage=one_of(each for run in PLAN.stages.values() for each in run),
    section="recipe|runtime",
    drafter=one_of([*PLAN.drafters, OURS, *ENGINES]),
    model=one_of(PLAN.models),
    dataset=one_of([*PLAN.data, *FETCHED]),
    answering=one_of(ANSWERS.answerings),
    collation=one_of(COLLATIONS),
    length=r"\d+",
    overlong=one_of(OVERLONG),
    rows=one_of(Path(folder).parent.name for folder in STATES.readers),
    declaration=one_of(Path(folder).name for folder in STATES.readers),


def answer_to(question, known):
    """Ask the plan: call the question with what is known under its arguments' names. If the question is a name, ask the first
    of the plans that answer for this measurement and know it.
    """
    if isinstance(question, str):
        others = MEASURED[known["measured"]]
        question = next(getattr(each, question) for each in others if hasattr(each, question))
    names = inspect.signature(question).parameters
    return question(**{name: known[name] for name in names if name in known})


def from_plan(question):
    """Return a function that Snakemake calls with wildcards and that asks the plan. Snakemake records a param's value, and a
    changed value runs the job again.
    """

    def answer(wildcards):
        return answer_to(question, dict(wildcards.items()))

    return answer


def from_plan_and_input(question):
    """Return a function that asks the plan with wildcards and named inputs. Snakemake does not record a param that follows from
    the input; it knows such a param by the function's argument `input`.
    """

    def answer(wildcards, input):
        return answer_to(question, dict([*input.items(), *wildcards.items()]))

    return answer


def option_with_files(word, name):
    """Return a param: an option of the command with the files of one of its inputs, or nothing if there are none."""

    def option(wildcards, input):
        files = input.get(name)
        return [word, *files] if files else []

    return option


def job_threads(wildcards, threads):
    """Return the cores of a job's processes. Commands read them from this resource, because Snakemake cuts `threads` to the
    cores of the machine that plans; a cluster's profile sets its own."""
    return threads


# What a job of whole nodes asks for, unless a profile says more.
NODE_JOB = dict(nodes=1, ranks=1, tasks_per_node=1, cpus_per_task=job_threads)


def shard_threads(wildcards):
    """Return the cores of one shard's job on this machine: all shards together share its cores."""
    cores = workflow.resource_settings.cores or 1
    return max(1, cores // PLAN.shards(wildcards.dataset))


def checked(question):
    """Return a function that asks the plan and ends the command if that fails: other commands may have other runs."""

    def answer(wildcards):
        with one_line_errors():
            return question()

    return answer


def remove_states():
    """Remove the states that no stage needs for training any more, at the end of a call of final_draft (Snakefile). temp()
    would remove less: a failed job's rows, which the next job goes on from, lie in undeclared files. And it would remove too
    much: states that are made again would train finished stages again."""
    called = {job.rule.name for job in workflow.dag.jobs}
    if "final_draft" in called and not workflow.touch:
        try:
            for folder in STATES.remove_unneeded():
                logger.info(f"removed {folder}: no stage needs these states any more")
        except (ValueError, OSError, KeyError, AttributeError, TypeError) as error:
            logger.warning(f"stored states are not removed: {error}")
