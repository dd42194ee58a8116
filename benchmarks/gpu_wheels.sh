#!/bin/sh
# What a GPU machine without a network lacks for `make gpu`, as wheels in one ignored folder, which goes along:
#
#     sh benchmarks/gpu_wheels.sh [FOLDER]      # build/gpu-wheels; make gpu installs from there, without a network
#
# That machine has Python 3.12, torch, transformers, NumPy, attrs, Cython, gcc and nvcc. DeepSpeed's wheel is built
# here, without its extensions: its CPU Adam is built there, as zfunc's kernel is. All others are downloaded.
set -eu
cd "$(dirname "$0")/.."
folder=${1:-build/gpu-wheels}
python=${PYTHON:-.venv/bin/python}
most=67108864 # bytes that go along
pure="einops hjson py-cpuinfo annotated-types typing-extensions typing-inspection tqdm packaging"
built="pydantic pydantic-core msgpack ninja psutil"
tests="pytest-xdist execnet hypothesis sortedcontainers"
peers="torchao==0.18.*" # 3 MB; its optimizers are Python, its kernels are for torch 2.11 on
rm -rf "$folder"
mkdir -p "$folder"
DS_BUILD_OPS=0 DS_BUILD_STRING='' "$python" -m pip wheel --quiet --no-build-isolation --no-deps \
    --wheel-dir "$folder" "deepspeed==0.19.*"
# pip resolves their versions, as those of pydantic and pydantic-core belong together.
"$python" -m pip download --quiet --only-binary :all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_12_x86_64 --platform manylinux_2_24_x86_64 \
    --dest "$folder" $pure $built $tests "$peers"
ls -l "$folder"
bytes=$(cat "$folder"/* | wc -c)
if [ "$bytes" -gt "$most" ]; then
    echo "got $bytes bytes in $folder, expected $most at most: leave something out" >&2
    exit 1
fi
echo "$bytes bytes in $folder, of $most at most"
