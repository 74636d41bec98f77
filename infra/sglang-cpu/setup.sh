#!/usr/bin/env bash
# The real SGLang 0.5.23 server in a venv of its own, on a machine without a GPU: wheels from PyPI and three small stand-ins
# (see README.md). usage: setup.sh VENV   About 5 minutes and 3.5 GB the first time. PYTHON names a Python 3.11.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=${1:?usage: setup.sh VENV}
"${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip install -q --disable-pip-version-check "$@"; }
pip torch==2.13.0 # on its own first: together with the rest pip tries many versions
pip -r "$here/requirements.txt"
pip --no-deps -r "$here/requirements-nodeps.txt"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
: > "$site/torchvision/_meta_registrations.py" # its table names operators of the CUDA build and breaks on a CPU torch
rm -rf "$venv/stubs" && cp -r "$here/stubs" "$venv/stubs" # pip leaves files beside what it builds
pip --no-deps --force-reinstall "$venv/stubs"
