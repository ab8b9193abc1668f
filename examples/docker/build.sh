#!/bin/sh
# Record what the server uses, and build the image: from the checkout, with the GPUs to build for.
#
#     examples/docker/build.sh 9.0,10.0
#
# The record names the sources beside it. A real server is recorded where it runs, on its GPU:
#     JITKERN_RECORD=run.jsonl python serve.py
case ${1:-} in -*) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit ;; esac
set -eu
archs=${1:-9.0,10.0}
JITKERN_RECORD=examples/own_kernel/run.jsonl \
    python examples/own_kernel/own_kernel.py --warm "${archs%%,*}"
docker build -f examples/docker/Dockerfile --build-arg "ARCHS=$archs" -t own-kernel .
