"""Say what a name was meant to be, and in which file or key a fault lies."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from longspec.shown import ManyLinesError

UNKNOWN = "unknown key"
# Keys of the experiment files of LongSpec's trainer and of SpecForge's: where the same is said here.
PUBLISHED = {
    **dict.fromkeys(("learning_rate", "optimizer_lr"), "the rate is recipe.optimizer.lr"),
    **dict.fromkeys(
        ("train_file", "train_data_path"),
        "a stage's data is recipe.data.name, a dataset of config/workflow.yaml; by hand files.data names its packed manifest",
    ),
    "hidden_states_path": "stored states are recipe.states.source: offline (docs/states.md); by hand files.states names them",
    "resume": "a stage goes on from its last checkpoint without a key; remove its checkpoints/ to begin anew",
    "tp_size": "a target that no GPU holds is runtime.target: partitioned in training, and ranks of the jobs that decode",
    "output_dir": "by hand it is files.out; in the workflow results/<run>/<variant>/<stage>",
    **dict.fromkeys(("num_train_epochs", "num_epochs"), "it is recipe.epochs"),
    "max_steps": "it is recipe.steps",
    **dict.fromkeys(
        ("per_gpu_train_batch_size", "train_micro_batch_size_per_gpu", "batch_size"),
        "rows of a GPU at a time are runtime.micro_batch, rows of a step recipe.global_batch",
    ),
    "gradient_accumulation_steps": "it follows from recipe.global_batch, runtime.micro_batch and the number of ranks",
    **dict.fromkeys(("max_seq_length", "max_length"), "it is recipe.data.sequence_length"),
    **dict.fromkeys(("max_grad_norm", "gradient_clipping"), "it is recipe.optimizer.clip"),
    **dict.fromkeys(("warmup_proportion", "warmup_steps"), "it is recipe.optimizer.warmup_ratio"),
    **{f"adam_{name}": f"it is recipe.optimizer.{here}" for name, here in (("epsilon", "eps"), ("betas", "betas"))},
    **dict.fromkeys(("save_steps", "save_interval"), "it is runtime.save_every"),
    **dict.fromkeys(("logging_steps", "log_interval"), "it is runtime.log_every"),
    **dict.fromkeys(("wandb_project", "tracker_name"), "it is runtime.tracker_project, and runtime.report_to says where"),
    "ds_cfg": "ZeRO and offload are runtime.deepspeed (or deepspeed=<a file of config/deepspeed/>)",
    "ttt_length": "steps of a training chain are recipe.draft.steps",
    "bf16": "recipe.precision says bf16, fp32 or auto",
    "fp16": "recipe.precision says bf16, fp32 or auto; nothing is trained in fp16",
    "model": "the target is recipe.model (or model=<a file of config/model/>)",
    "model_name_or_path": "the target is recipe.model.source, such as hf:<owner>/<repository> or a folder, and "
    "files.target names its target_manifest.json",
    "draft_model_name_or_path": "the draft to begin with is files.init_weights, a draft folder or a file of weights",
    "ignore_mismatched_sizes": "weights that do not fit are always refused, by the names of their tensors; remove the key",
}


@contextmanager
def faults_in(place: object) -> Iterator[None]:
    """Name what is at fault, a file or a key, before each line of a ValueError of the block."""
    try:
        yield
    except ValueError as error:
        raise ManyLinesError(*(f"{place}: {line}" for line in str(error).split("\n"))) from error


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The names that exist, the likeliest typo first."""
    close = difflib.get_close_matches(name, known := sorted(known), n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}Known: {', '.join(known) or 'none'}."


def unknown_key(name: str, known: Iterable[str]) -> str:
    """Say of an unknown key which ones are known, or where another trainer's key is said here."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    if name in PUBLISHED and not (close and close[0] in name):  # batch_size is the `batch` of a section that has one
        return f"{UNKNOWN}, of another trainer: {PUBLISHED[name]}"
    return f"{UNKNOWN}; {did_you_mean(name, known)}"
