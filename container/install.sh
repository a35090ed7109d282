#!/bin/sh
# Install the project with its pinned versions; the image's one build step, whichever tool builds it.
#   install.sh SOURCE PREFIX        pip's own variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL) count
set -eu
source=$1 prefix=$2
python3 -m venv "$prefix"
pip="$prefix/bin/python -m pip --disable-pip-version-check install --no-cache-dir -c $source/constraints.txt"
$pip "$source[train,track]"
# flash-attn is compiled against the torch that is there now, where there is a compiler for GPUs.
if command -v nvcc > /dev/null; then
  $pip setuptools wheel ninja packaging
  $pip --no-build-isolation "$source[gpu]"
fi
"$prefix/bin/python" -m longspec.cluster --help > /dev/null
