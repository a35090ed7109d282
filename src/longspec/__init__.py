"""longspec: trains draft models for lossless speculative decoding at long context."""

import os

# Before torch is loaded: how long OpenMP's threads spin for the next piece of work before they sleep; the numbers are the same.
# A forward of 30 layers hands out some hundred pieces: on two threads it takes 66 ms where nobody spins and 40 with 0.1 ms. The
# runtime's own 3 ms are no faster, and a busy process beside them makes 600 to 1,500 ms of these 40 (135 with 0.1 ms). GNU's
# runtime takes the first variable, of which others know nothing (benchmarks/spin.py).
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# GNU's allocator hands what is free at its end back to the system, which clears each page when it is asked for again: a seventh
# of a training step on a CPU (benchmarks/heap.py). With these a process keeps up to 256 MiB, and takes blocks of up to 32 MiB,
# the most that it can be told, from there. It reads them when it begins, so they hold for the jobs that are started from here.
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**28))
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**25))
