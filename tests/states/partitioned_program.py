"""Run by torchrun on two ranks: a partitioned target against a replicated one, forward by forward.

Arguments: a folder, in which each rank writes its JSON file, and target folders.
"""

import json
import sys
from pathlib import Path

import torch

from longspec.distributed import end_at_once, find_ranks
from longspec.methods.glide.attach import attach
from longspec.methods.glide.settings import Draft
from longspec.methods.glide.trainer import Glide
from longspec.states.load import load_partitioned
from longspec.train.engine import boot

LENGTHS = (20, 1, 29)


def gradients(glide: Glide, loss: torch.Tensor) -> torch.Tensor:
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, list(glide.draft_model.parameters()))])


def compare(path: str, loss: str) -> dict[str, object]:
    draft = Draft(window=20, anchors="off", lag_mode="random", loss=loss, final_norm=True)
    states = load_partitioned(path, torch.float32, "sdpa")
    shares = {name: (p.ds_tensor.numel(), p.ds_numel, p.numel()) for name, p in states.target.named_parameters()}
    glides = []
    for given in (states, None):
        torch.manual_seed(0)  # the same draft beside both
        glides.append(attach(path, dtype=torch.float32, draft=draft, states=given, attention="sdpa"))
    torch.manual_seed(1 + find_ranks().rank)
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS)).expand(2, 50)
    differences, left_over = [], set()
    # Two forwards of each kind: DeepSpeed records their order in the first, and from then on fetches ahead.
    for chunk, with_llm_loss in [(None, True)] * 2 + [(None, False)] * 2 + [(17, True)] * 2:
        ids = torch.randint(0, glides[0].config.vocab_size, (2, 50))
        results = []
        for glide in glides:
            glide.states.chunk = chunk
            output = glide(ids, ids, lag=2, document_ids=documents, with_llm_loss=with_llm_loss)
            results.append((gradients(glide, output.loss), output.loss.detach(), output.llm_loss))
        left, right = results
        differences.append(float((left[0] - right[0]).norm() / right[0].norm()))
        differences.append(float((left[1] - right[1]).abs()))
        assert (left[2] is None) == (right[2] is None)
        differences.append(0.0 if left[2] is None else float((left[2] - right[2]).abs()))
        whole = {name for name, p in states.target.named_parameters() if p.numel() == p.ds_numel and not p.ds_persist}
        if len(differences) % 6 == 0:
            left_over |= whole
    return {"shares": shares, "largest_difference": max(differences), "left_over": sorted(left_over)}


def main() -> None:
    ranks = find_ranks()
    boot(ranks, 5)
    torch.set_num_threads(1)
    out, *paths = sys.argv[1:]
    results = [compare(path, loss) for path, loss in zip(paths, ("soft", "hard", "soft"), strict=True)]
    Path(out, f"{ranks.rank}.json").write_text(json.dumps(results))
    end_at_once(0)


if __name__ == "__main__":
    main()
