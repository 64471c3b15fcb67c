#!/usr/bin/env bash
# Creates or completes a virtual environment that holds the trainer and a CPU SGLang server.
#   tools/install.sh VENV [EXTRA ...]      extras: train (default) test textworld
# Pins come from constraints.txt. Repeating it is cheap: nothing is done when nothing changed.
set -euo pipefail
venv=${1:?usage: tools/install.sh VENV [EXTRA ...]}; shift
extras=train
for extra in "$@"; do [ "$extra" = train ] || extras="$extras,$extra"; done
cd "$(dirname "$0")/.."
stamp="$venv/.megatrl-installed-$extras"
if [ -e "$stamp" ] && [ -z "$(find pyproject.toml constraints.txt tools -newer "$stamp" -type f 2>/dev/null)" ]; then exit 0; fi
if [ ! -x "$venv/bin/python" ]; then
    if ! command -v python3.11 >/dev/null; then
        echo "tools/install.sh: python3.11 is not on PATH; install Python 3.11 (Debian: apt-get install python3.11-venv)" >&2
        exit 1
    fi
    if ! python3.11 -c 'import ensurepip, venv' 2>/dev/null; then
        echo "tools/install.sh: this python3.11 has no ensurepip, so it cannot make a virtual environment with pip;" \
            "install it (Debian: apt-get install python3.11-venv) or name an existing environment: make VENV=PATH" >&2
        exit 1
    fi
    python3.11 -m venv "$venv"
fi
pip() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
pip torch==2.13.0                                       # first and alone: a CPU build where one is offered
pip --constraint constraints.txt --editable ".[$extras]"
pip --constraint constraints.txt --requirement tools/sglang-cpu-requirements.txt
# Last, because pip complains of everything that these declare and a CPU server does not need.
pip --no-deps sglang==0.5.23 sglang-router==0.3.2 xgrammar==0.2.7
touch "$stamp"
