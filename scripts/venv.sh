#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# scripts/venv.sh FOLDER EXTRAS: a virtual environment with torch and zeropp (editable, built here) in FOLDER.
#
# A Python that has torch >= 2.11 already is preferred, and its torch is used, never replaced. Otherwise torch is
# installed. What is missing on the machine is found first, and answered with the line that installs it.
# Variables: PYTHON (which interpreter), TORCH_INDEX (another wheel index, for machines that want the CPU-only build).
set -eu

folder=$1
extras=$2
py="$folder/bin/python"

say() { printf '%s\n' "$*" >&2; }
stop() {
    say "zeropp: $1"
    [ -z "${2:-}" ] || say "    $2"
    exit 1
}

new_enough() { "$1" -c 'import sys; raise SystemExit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

# Whether this interpreter has torch >= 2.11, from its metadata: importing torch takes seconds.
has_torch() {
    "$1" - >/dev/null 2>&1 <<'PY'
import importlib.metadata
import re

version = importlib.metadata.version("torch")
numbers = tuple(int(part) for part in re.match(r"(\d+)\.(\d+)", version).groups())
raise SystemExit(numbers < (2, 11))
PY
}

choose_python() {
    candidates=${PYTHON:-python3.11 python3.12 python3.13 python3.10 python3.14 python3}
    usable=
    for name in $candidates; do
        command -v "$name" >/dev/null 2>&1 || continue
        new_enough "$name" || continue
        if has_torch "$name"; then
            echo "$name"
            return
        fi
        usable=${usable:-$name}
    done
    [ -n "$usable" ] || stop "no Python >= 3.10 found (looked for: $candidates)" \
        "apt-get install python3 python3-venv python3-dev"
    echo "$usable"
}

# Everything a build needs, before anything is downloaded.
check_machine() {
    short=$("$1" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    "$1" -c 'import venv, ensurepip' >/dev/null 2>&1 ||
        stop "$1 cannot make virtual environments" "apt-get install $short-venv"
    header=$("$1" -c 'import sysconfig; print(sysconfig.get_paths()["include"] + "/Python.h")')
    [ -f "$header" ] || stop "the headers of $1 are missing (no $header)" "apt-get install $short-dev"
    compiler=${CC:-cc}
    command -v "${compiler%% *}" >/dev/null 2>&1 || stop "no C compiler (looked for $compiler)" "apt-get install gcc"
}

make_environment() {
    python=$(choose_python)
    check_machine "$python"
    if has_torch "$python"; then
        say "zeropp: $folder uses the torch of $python"
        "$python" -m venv --clear --system-site-packages "$folder"
        # The packages of a virtual environment are not among the system's: name their folder.
        has_torch "$py" || "$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' \
            >"$("$py" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/zeropp_parent.pth"
    else
        say "zeropp: $folder is made with $python, and torch is installed into it"
        "$python" -m venv --clear "$folder"
        install_torch
    fi
    has_torch "$py" || stop "$folder has no torch >= 2.11 after all"
}

install_torch() {
    if [ -n "${TORCH_INDEX:-}" ]; then
        "$py" -m pip install --quiet --index-url "$TORCH_INDEX" "torch>=2.11"
    else
        # The version that is tested first; any that is new enough where this one cannot be had.
        "$py" -m pip install --quiet "torch==2.13.0" || "$py" -m pip install --quiet "torch>=2.11"
    fi || stop "torch >= 2.11 could not be installed" \
        "try another wheel index: make ... TORCH_INDEX=URL, or another interpreter: PYTHON=python3.12"
}

if [ -x "$py" ] && has_torch "$py"; then
    check_machine "$py"
else
    make_environment
fi
say "zeropp: building and installing into $folder (extras: $extras)"
"$py" -m pip install --quiet "setuptools>=77"
# No build isolation: building needs setuptools only, which is here now.
"$py" -m pip install --quiet --no-build-isolation --editable ".[$extras]" ||
    stop "installing zeropp failed; the lines above say why"
