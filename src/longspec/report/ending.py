"""Return what a finished run says at its end: its drafts' acceptance, its report, and what to type next. No torch."""

from pathlib import Path
from shlex import quote
from typing import Any

from longspec import methods
from longspec.atomic_files import read_json
from longspec.engines import VLLM

TITLE = "tokens a round, the target's own included, with their 95 % interval; times plain decoding's speed"


def lines(run: str, given: str | None = None) -> list[str]:
    """Return the closing lines of the run in this folder; none before its report exists. given: its file, if not its name."""
    numbers = Path(f"results/{run}/report.json")
    if not numbers.is_file():
        return []
    report = read_json(numbers)
    told: list[str] = []
    for variant, drafters in report["overall"].items():
        told += ["", f"{variant}: {TITLE}"]
        told += [_row(report, variant, drafter, tau) for drafter, tau in drafters.items()]
        lossless = report["lossless"][variant]
        compared = f"{lossless['tokens_compared']} tokens, {lossless['unexplained']} unexplained differences"
        told.append(f"  greedy output compared: {compared if lossless['tokens_compared'] else 'none'}")
    told += ["", f"Report: {numbers.with_suffix('.html').resolve()}"]
    for variant in report["overall"]:
        served = quote(given or run) + (f" --variant {variant}" if len(report["overall"]) > 1 else "")
        told += _next(served, Path(f"results/{run}/{variant}/final_draft"))
    return told


def _row(report: dict[str, Any], variant: str, drafter: str, tau: dict[str, Any]) -> str:
    interval = "" if tau["low"] is None else "{low:.2f} .. {high:.2f}".format(**tau)
    speed = report["speed"][variant][drafter]["speed_up"]["mean"]
    mark = "  published" if drafter == report["final"][variant]["stage"] else ""
    return f"  {drafter:12s} {tau['mean']:.2f}  {interval:12s}  {speed:.2f}{mark}"


def _next(served: str, draft: Path) -> list[str]:
    """Return the commands to see the draft at work, and to serve it if an engine loads it. served: the arguments of `serve`."""
    if not (draft / "config.json").is_file():
        return []
    config = read_json(draft / "config.json")
    told = [f"Try it:    longspec try {draft}"]
    if VLLM in methods.settings_of(str(config["draft"])).SERVED:
        return [*told, f"Serve it:  longspec serve {served}"]
    return [*told, f"Serve it:  no engine loads {config['draft']} drafts; transformers' generate does: docs/generate.md"]
