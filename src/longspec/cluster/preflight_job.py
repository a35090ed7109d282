"""Preflight checks of one job: memory, disk, the target and its tokenizer, and the services it reports to."""

import secrets
import shutil
import time
from pathlib import Path
from typing import Any

from longspec.atomic_files import check_files, read_json, write_text
from longspec.cluster.preflight_ranks import FAIL, OK, POLL, WARN, Finding, Place
from longspec.data import tokenize
from longspec.data.chat.chat_template import ChatTemplate
from longspec.data.chat.special_tokens import LayoutError
from longspec.families import check_family
from longspec.models.model_folder import weight_files
from longspec.models.target import resolve_dtype
from longspec.models.weight_files import open_safetensors
from longspec.train.estimate.grad_accum import share_global_batch, sharing_ranks
from longspec.train.estimate.memory import GPU_OVERHEAD, Setup, estimate, peak, setup_of
from longspec.train.estimate.memory_check import explain_out_of_memory, gib
from longspec.train.trackers import check_key
from longspec.train.tracking import chosen

HASHED = 64 * 2**20  # files below it are hashed
WRITTEN = 64 * 2**20  # bytes of the test file
SHOWN = ".preflight-"  # the test file's name, before the beginning of the token that it repeats
CHAT = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "And 14 - 3?"},
    {"role": "assistant", "content": "That is 11, since 11 + 3 = 14."},
]


def setups(place: Place) -> dict[str, Setup]:
    """Inputs of the memory and disk estimates, by stage. Raises ValueError when the ranks cannot share a global batch."""
    found, nodes = {}, place.ranks.world_size // len(place.neighbours)
    for recipe, runtime in place.stages:
        world_size = nodes * sharing_ranks(recipe.global_batch, nodes, len(place.neighbours))
        micro_batch, _ = share_global_batch(recipe.global_batch, runtime.micro_batch, world_size)
        dtype = resolve_dtype(recipe.precision)
        found[recipe.stage] = setup_of(place.config, recipe, runtime, micro_batch, world_size, dtype, place.device)
    return found


def memory(place: Place) -> Finding | None:
    """Does every stage fit, by the project's own estimate, the GPUs and the main memory of the nodes?"""
    if not place.ranks.is_main:
        return None
    on_gpu, host = place.device.type == "cuda", place.facts[0].host_memory
    nodes, needs = place.ranks.world_size // len(place.neighbours), []
    for stage, setup in setups(place).items():
        items, ranks = estimate(setup), setup.world_size // nodes
        device = min(facts.memory for facts in place.facts.values()) if on_gpu else host // ranks
        here, there = peak(items), peak(items, on_host=True) * ranks
        if here > device:
            return Finding(FAIL, f"stage {stage}: {explain_out_of_memory(setup, device)}", "change one of these settings")
        if there + (0 if on_gpu else here * ranks) > host:
            found = f"stage {stage}: the ranks of a node take {gib(there)} of its main memory, of which the job has {gib(host)}"
            return Finding(FAIL, found, "ask for more (mem_mb), or set runtime.deepspeed.offload_optimizer: none")
        needs.append(f"{stage} {gib(here)}" + (f" and on the host {gib(there)}" if there else ""))
    taken = [rank for rank, facts in place.facts.items() if facts.memory - facts.free > GPU_OVERHEAD]
    found = f"{'; '.join(needs)}; a rank has {gib(device)}, its node {gib(host)}"
    if taken:
        return Finding(WARN, f"{found}; others hold a part of the GPU of {place.names(taken)}", "nvidia-smi shows whom to end")
    return Finding(OK, found)


def disk(place: Place) -> Finding | None:
    """Is there room for all stages, and can be written? The file that is written stays for shared_folder to look at."""
    if not place.ranks.is_main:
        return None
    token, began = secrets.token_hex(32), time.perf_counter()
    fix = f"give the run a folder that can be written, with room (quota, df -h {place.out})"
    try:
        write_text(place.out / f"{SHOWN}{token[:8]}", token * (WRITTEN // len(token)))
    except OSError as error:
        return Finding(FAIL, f"a file of {gib(WRITTEN)} cannot be written: {error}", fix)
    place.tell(SHOWN, token)
    speed = f"wrote {gib(WRITTEN)} at {WRITTEN / 1e6 / (time.perf_counter() - began):.0f} MB/s"
    from longspec.train.estimate.plan import disk_bytes  # with it comes DeepSpeed

    free, needed = shutil.disk_usage(place.out).free, sum(map(disk_bytes, setups(place).values()))
    if free < needed:
        return Finding(FAIL, f"{gib(free)} free at {place.out}, the stages leave up to {gib(needed)}", fix)
    return Finding(OK, f"{gib(free)} free, the stages leave up to {gib(needed)}; {speed}")


def shared_folder(place: Place) -> Finding | None:
    """Does each node see what rank 0 has written, and can it write there too?

    It looks for as long as a file system of a network may keep an old listing.
    """
    if not place.is_first_of_node:
        return None
    shown = place.hear(SHOWN, [0], 0)
    if not shown:
        return Finding(WARN, "not checked: rank 0 has written no file, see the check of the disk")
    token, until = shown[0], time.monotonic() + place.seconds / 2
    path = place.out.absolute() / f"{SHOWN}{token[:8]}"
    while not (path.parent.is_dir() and path in path.parent.iterdir()):
        if time.monotonic() > until:
            found = f"{path}, which rank 0 wrote, is not there after {place.seconds / 2:.0f} s"
            return Finding(FAIL, found, "place the run on a file system that all nodes share")
        time.sleep(POLL)
    if path.read_text() != token * (WRITTEN // len(token)):
        return Finding(FAIL, f"{path} reads other than rank 0 wrote it", "see the file system's cache settings")
    own = path.with_name(f"{path.name}-{place.ranks.rank}")
    write_text(own, token)
    own.unlink()
    return Finding(OK, f"{place.out}, seen from {', '.join(dict.fromkeys(facts.host for facts in place.facts.values()))}")


def remove_shown(place: Place) -> None:
    """Remove the file that the check of the disk has written."""
    for token in place.hear(SHOWN, [0], 0).values():
        (place.out / f"{SHOWN}{token[:8]}").unlink(missing_ok=True)


def target(place: Place) -> Finding | None:
    """Are the target's files there and whole, as this node sees them, and is it one that drafts can be trained for?"""
    if not place.is_first_of_node:
        return None
    manifest = read_json(place.target)
    folder, files = Path(manifest["path"]), manifest["files"]
    check_files(folder, files, place.target, hashes=False)
    small = {name: file for name, file in files.items() if file["bytes"] < HASHED}
    check_files(folder, small, place.target)
    weights = [folder / name for name in weight_files(folder)]
    for path in weights:
        if path.suffix == ".safetensors":
            open_safetensors(path)
    check_family(read_json(folder / "config.json").get("model_type"), folder / "config.json")
    size = gib(sum(path.stat().st_size for path in weights))
    return Finding(OK, f"{place.config.model_type}, {len(weights)} weight files of {size} whole, {len(small)} files hashed")


def tokenizer(place: Place) -> Finding | None:
    """Does the tokenizer load, fit the target, and lay a conversation out as the template does?"""
    if not place.ranks.is_main:
        return None
    made, _ = tokenize.load(place.tokenizer)
    if len(made) > place.config.vocab_size:
        found = f"{len(made)} entries, but the target embeds {place.config.vocab_size}"
        return Finding(FAIL, found, "give the tokenizer that belongs to the target")
    if not made.chat_template:
        found = "no chat template (a base model?): the target's own chats cannot be tokenized; they would be laid out as ChatML"
        return Finding(WARN, found, "nothing for plain text; else put a chat_template.jinja beside tokenizer.json")
    fix = "give a tokenizer whose chat template renders user and assistant turns; texts without chats need none"
    try:
        ids = tokenize.encode(made, {"messages": CHAT})[0].tolist()
    except LayoutError as error:
        return Finding(FAIL, f"a chat of two turns cannot be laid out: {error}", fix)
    expected = template_ids(made)
    pairs = zip(ids, expected, strict=False)
    shared = next((i for i, (own, theirs) in enumerate(pairs) if own != theirs), min(len(ids), len(expected)))
    # We leave out white space behind the last answer, and close the document with eos.
    if ids[shared:] not in ([], [made.eos_token_id]) or made.decode(expected[shared:]).strip():
        return Finding(FAIL, f"a chat of two turns becomes other tokens than the template's, from token {shared} on", fix)
    return Finding(OK, f"{len(made)} entries; a chat of two turns is {len(ids)} tokens, the template's own")


def template_ids(made: Any) -> list[int]:
    """The conversation as transformers tokenizes it by the template, with the day that we always write."""
    template = ChatTemplate.of(made).template
    return list(made.apply_chat_template(CHAT, chat_template=template, tokenize=True, return_dict=False))


def trackers(place: Place) -> Finding | None:
    """Are the services' packages here, and in online mode a key? Nothing is sent."""
    if not place.ranks.is_main:
        return None
    used = dict.fromkeys((name, runtime.tracker_mode) for runtime in place.runtimes for name in chosen(runtime))
    for name, mode in used:
        if mode == "online":
            check_key(name)
    return Finding(OK, ", ".join(map(" ".join, used)) or "none; metrics.jsonl has every step")
