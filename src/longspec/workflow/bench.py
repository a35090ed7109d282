"""What a run measures apart, when it is asked for: `evaluation.bench`, with a page of its own."""

from longspec.config.faults import faults_in
from longspec.workflow import paths
from longspec.workflow.answers import AnswersPlan
from longspec.workflow.checks import check_answered, check_apart
from longspec.workflow.plan import Plan
from longspec.workflow.settings import datasets, evaluations, runs


class Bench(Plan):
    """The plan's answers for what is measured apart, of the runs that measure something apart: `evaluation_of` names them."""

    evaluated = paths.BENCHED

    def report_variants(self, run: str) -> list[str]:
        """Return the report's options: the folders it reads, by variant, and which of their evaluations."""
        return [*super().report_variants(run), "--evaluations bench"]

    def pages(self) -> list[str]:
        """The page of each of these runs. Raises ValueError where none of the chosen runs has one."""
        if not self.evaluation_of:
            raise ValueError(
                f"runs: {', '.join(self.runs)}: none has evaluation.bench, what is measured apart; add it to "
                f"{self.files[self.runs[0]].file}, such as evaluation: {{bench: {{prompts: 8, tasks: {{...}}}}}}"
            )
        return [paths.BENCH_PAGE.format(run=run) for run in self.evaluation_of]


def bench_of(plan: Plan) -> Bench:
    """A checked plan's bench. Raises ValueError with the key that is wrong."""
    apart = {run: evaluations.apart(each) for run, each in plan.evaluation_of.items() if each.section.get("bench")}
    bench = Bench(plan.settings, plan.files, plan.variants, plan.configs, apart)
    of_these = {key: config for key, config in plan.configs.items() if key[0] in apart}
    runs.check_targets(of_these, apart)
    datasets.check_data(bench.datasets_in_use(), plan.data, plan.files.values())
    with faults_in(datasets.FILE):
        AnswersPlan(bench)
    check_answered(bench)
    check_apart(bench)
    for each in apart.values():
        datasets.check_task_files(each.tasks, plan.datasets_trained_on(), plan.data, each.file_of("bench"))
    return bench
