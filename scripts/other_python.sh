#!/usr/bin/env bash
# The demo and the core's tests on another Python than this machine's: Debian trixie's 3.13 in a folder of its own, as root.
#
#     scripts/other_python.sh FOLDER          make a root there, install asyncrl of HEAD in it, run `make demo` and the tests
#     scripts/other_python.sh FOLDER COMMAND  a command in it instead, in the clone /project
#     scripts/other_python.sh --remove FOLDER
#
# It downloads a Debian of 500 MB and the packages of scripts/install.sh; DEVICE=cuda takes torch from PyPI (2.5 GB more)
# where the index of CPU builds cannot be reached. Last results: docs/lab-log/tools.md.
set -euo pipefail
REMOVE=0
if [ "${1:-}" = --remove ]; then REMOVE=1 && shift; fi
FOLDER="${1:?a folder}" ROOT="$1/root" SUITE="${SUITE:-trixie}" MIRROR="${MIRROR:-http://deb.debian.org/debian}"
TESTS='.venv/bin/python -m pytest -q -n "${JOBS:-2}" tests/unit tests/system'
COMMAND="${2:-make demo && $TESTS}"

if [ "$REMOVE" = 1 ]; then
  for each in dev/shm dev proc; do if mountpoint -q "$ROOT/$each"; then umount "$ROOT/$each"; fi; done
  if mount | grep -q " $(realpath "$ROOT")/"; then echo "error: something is still mounted in $ROOT" >&2; exit 1; fi
  rm -rf --one-file-system "$FOLDER"
  exit
fi

command -v debootstrap >/dev/null || { echo "error: debootstrap is not installed. Run: apt-get install debootstrap" >&2; exit 2; }
mkdir -p "$FOLDER"
if [ ! -d "$ROOT/project" ]; then
  debootstrap --variant=minbase --include=python3,python3-venv,python3-dev,gcc,libc6-dev,make,ca-certificates,git \
    "$SUITE" "$ROOT" "$MIRROR" >"$FOLDER/debootstrap.log" 2>&1
  # The machine's own name, which torchrun connects to, and the ways of a machine behind a proxy.
  for each in /etc/hosts /etc/resolv.conf /etc/ssl/certs/ca-certificates.crt "$HOME/.config/pip"; do
    if [ -e "$each" ]; then mkdir -p "$ROOT$(dirname "$each")" && cp -rT "$each" "$ROOT$each"; fi
  done
  git clone -q "$(git rev-parse --show-toplevel)" "$ROOT/project"
fi
for each in proc dev dev/shm; do mountpoint -q "$ROOT/$each" || mount --bind "/$each" "$ROOT/$each"; done
mapfile -t settings < <(env | grep -E '^(PIP_|SSL_|REQUESTS_CA|CURL_CA|https?_proxy)' | grep -v FIND_LINKS)
exec chroot "$ROOT" /usr/bin/env -i HOME="$HOME" PATH=/usr/bin:/bin:/usr/sbin:/sbin LANG=C.UTF-8 DEVICE="${DEVICE:-cpu}" JOBS="${JOBS:-2}" \
  "${settings[@]}" bash -c "cd /project && python3 -V && bash scripts/install.sh && $COMMAND"
