"""Where everything lies: the patterns of all files that rules make. A name in braces is a wildcard.

Beside these, never a declared output: results/{run}/{variant}/{stage}/checkpoints/, from which a stage goes on.
"""

from longspec.config.names import IMPORTED
from longspec.data.hub import MANIFEST

HUB = MANIFEST  # of what was fetched, pinned
RAW = "data/raw/{dataset}/manifest.json"  # records, kept and held out; beside it what was rejected
ANSWERS = "data/answers/{model}/{dataset}/{answering}"  # a target's own, in the place of raw records
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
BEGINNING = f"results/{{run}}/{{variant}}/{IMPORTED}/draft"  # that draft, where a stage's lies
STATES = "data/states/{model}/{rows}/{declaration}"  # while a stage needs them
STAGE_STATES = "results/{linked}/states.json"
# measured: evaluation, a run's own; bench, what it measures apart; serves, its final draft by an engine in a drafter's place.
MEASURED = "results/{run}/{variant}/{measured}/{drafter}.jsonl"
SERVES_GATES = "results/{run}/serves_gates.json"
FINAL_STAGE = "results/{run}/{variant}/final_stage.json"  # which is published, where it is chosen
FINAL_DRAFT = "results/{run}/{variant}/final_draft"
PREFLIGHT = "results/{run}/preflight.json"
PAGE = "results/{run}/{measured}.html"  # report, bench, serves; its numbers lie beside it
REPORT = PAGE.replace("{measured}", "report")
NUMBERS = REPORT.replace(".html", ".json")
GATES = "results/{run}/gates.json"
COMPARED = "results/compare/{first}_{second}"  # no run's name has an underscore

DRAFT_FILES = ("model.safetensors", "draft_model_weights.pth", "config.json", "custom_generate/generate.py")

FINAL_FILES = (*DRAFT_FILES, "training_config.yaml", "provenance.json")


def stage_folder(run: str, variant: str, stage: str) -> str:
    """The folder of a stage, or of another drafter that lies where stages do."""
    return STAGE.format(run=run, variant=variant, stage=stage)
