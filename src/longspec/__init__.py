"""longspec: trains draft models for lossless speculative decoding at long context."""

import os

# Before torch is loaded: OpenMP threads that spin while they wait slow each other down several times over as soon as
# anything else runs on the machine. The numbers are the same.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
