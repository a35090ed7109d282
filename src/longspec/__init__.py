"""longspec: trains draft models for lossless speculative decoding at long context."""

import os

# Before torch is loaded: how long OpenMP's threads spin for the next piece of work before they sleep; the numbers are the same.
# A forward of 30 layers hands out some hundred pieces: on two threads it takes 66 ms where nobody spins and 40 with 0.1 ms. The
# runtime's own 3 ms are no faster, and a busy process beside them makes 600 to 1,500 ms of these 40 (135 with 0.1 ms). GNU's
# runtime takes the first variable, of which others know nothing (benchmarks/spin.py).
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# GNU's allocator gives freed memory back, and each page is cleared anew: a seventh of a training step (benchmarks/heap.py). It
# reads these when a process begins: jobs started from here keep up to 256 MiB, and take blocks of up to 32 MiB from there.
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**28))
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**25))
# MKL promises the same sums from run to run in one mode alone, in which its threads share work by a fixed plan (oneMKL's guide,
# "Reproducibility Conditions"). AUTO takes the kernels of each processor: on a Xeon numbers and times are those without it.
os.environ.setdefault("MKL_CBWR", "AUTO")
