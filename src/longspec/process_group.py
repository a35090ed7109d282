"""The process group of a job's ranks: nccl on GPUs, gloo on CPUs."""

import os
import socket
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from longspec.distributed import GPUS_GIVEN, ON_PROCESSORS, Ranks


def own_device(ranks: Ranks) -> torch.device:
    """Return this rank's GPU, or the CPU if there is none.

    Raises ValueError if the job was given GPUs and torch sees none.
    """
    if os.environ.get(GPUS_GIVEN) and not torch.cuda.is_available():
        raise ValueError(
            f"{socket.gethostname()}: the job was given GPUs ({os.environ[GPUS_GIVEN]}), and torch sees none; look at this "
            f"node's driver and at the build of torch, or set {ON_PROCESSORS}=1 where the jobs start"
        )
    return torch.device("cuda", ranks.local_rank) if torch.cuda.is_available() else torch.device("cpu")


def join(ranks: Ranks, timeout_minutes: float) -> torch.device:
    """Join the process group; return this rank's device, now torch's current one. Raises ValueError if the rank has no GPU."""
    device = own_device(ranks)
    if device.type == "cuda":
        if ranks.local_rank >= (gpus := torch.cuda.device_count()):
            raise ValueError(f"ranks: process {ranks.local_rank + 1} of this node has no GPU, there are {gpus}; start {gpus}")
        torch.cuda.set_device(device)
    if sys.platform == "linux" and os.environ["MASTER_ADDR"] in ("localhost", "127.0.0.1"):
        # Else gloo looks up this machine's name, which laptops and containers often cannot resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = timedelta(minutes=timeout_minutes)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    return device
