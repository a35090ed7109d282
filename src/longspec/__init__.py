"""longspec: trains draft models for lossless speculative decoding at long context."""

import os

# Set before torch loads: how long OpenMP's threads spin for more work before they sleep. Numbers stay the same. A forward of 30
# layers hands out some hundred pieces: on two threads it takes 66 ms without spinning, 40 ms with 0.1 ms of it. The runtime's
# own 3 ms are no faster, and beside a busy process they turn these 40 ms into 600 to 1,500 (135 with 0.1 ms). Only GNU's
# runtime reads the first variable (benchmarks/spin.py).
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# GNU's allocator gives freed memory back, and each page is cleared anew: a seventh of a training step (benchmarks/heap.py). A
# process reads these when it begins: jobs started from here keep up to 256 MiB, and take blocks of up to 32 MiB from there.
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**28))
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**25))
# MKL promises equal sums from run to run in one mode only, where its threads share work by a fixed plan (oneMKL's guide,
# "Reproducibility Conditions"). AUTO takes each processor's own kernels: on a Xeon, numbers and times are as without it.
os.environ.setdefault("MKL_CBWR", "AUTO")
