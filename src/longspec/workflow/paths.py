"""Define the paths of all files that rules make. A name in braces is a wildcard.

Also there, but never a declared output: results/{run}/{variant}/{stage}/checkpoints/, from which a stage resumes.
"""

from longspec.config.names import IMPORTED
from longspec.data.hub import MANIFEST

HUB = MANIFEST  # manifest of fetched, pinned files
RAW = "data/raw/{dataset}/manifest.json"  # records, kept and held out; rejected ones lie next to it
ANSWERS = "data/answers/{model}/{dataset}/{answering}"  # a target's own, used instead of raw records
TOKENS = "data/tokens/{model}/{dataset}/{shard}.json"
PACKED = "data/packed/{model}/{dataset}-{collation}-{length}-{overlong}/manifest.json"
BUILD = "models/{model}/build.yaml"
TOKENIZER = "models/{model}/tokenizer_manifest.json"
WHEEL_FILE = "models/{model}/wheel_file.json"
TARGET = "models/{model}/target_manifest.json"
STAGE = "results/{run}/{variant}/{stage}"
SECTION = f"{STAGE}/{{section}}.yaml"
RECIPE = f"{STAGE}/recipe.yaml"
DRAFT_VOCABULARY = "results/{run}/{variant}/draft_vocabulary_{size}.json"
PUBLISHED = "models/drafts/{draft}/manifest.json"  # of a draft that runs begin with
BEGINNING = f"results/{{run}}/{{variant}}/{IMPORTED}/draft"  # that draft, at a stage's place
STATES = "data/states/{model}/{rows}/{declaration}"  # exists while a stage needs it
STAGE_STATES = "results/{linked}/states.json"
# measured: evaluation, a run's own; bench, what it measures apart; serves, its final draft, by engine instead of drafter.
MEASURED = "results/{run}/{variant}/{measured}/{drafter}.jsonl"
SERVES_GATES = "results/{run}/serves_gates.json"
FINAL_STAGE = "results/{run}/{variant}/final_stage.json"  # the published stage, if it is chosen
FINAL_DRAFT = "results/{run}/{variant}/final_draft"
PREFLIGHT = "results/{run}/preflight.json"
PAGE = "results/{run}/{measured}.html"  # report, bench, serves; its numbers are next to it
REPORT = PAGE.replace("{measured}", "report")
NUMBERS = REPORT.replace(".html", ".json")
GATES = "results/{run}/gates.json"
COMPARED = "results/compare/{first}_{second}"  # names of runs have no underscore

DRAFT_FILES = ("model.safetensors", "draft_model_weights.pth", "config.json", "custom_generate/generate.py")

FINAL_FILES = (*DRAFT_FILES, "training_config.yaml", "provenance.json")


def stage_folder(run: str, variant: str, stage: str) -> str:
    """Return the folder of a stage, or of another drafter that is stored like a stage."""
    return STAGE.format(run=run, variant=variant, stage=stage)
