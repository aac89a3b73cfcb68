#!/usr/bin/env bash
# What some tests need, which are skipped without it: of Debian Prometheus with promtool, docker-compose and Chromium; of
# Python TRL, OpenEnv's server and verifiers. OpenEnv asks for gradio, which wants an older Pillow: it is installed without it.
set -euo pipefail
PYTHON=$(cd "$(dirname "$0")/.." && pwd)/.venv/bin/python
WHOLE=$(dirname "$(dirname "$PYTHON")")/installed-vllm  # make install-vllm is through: nothing else installs meanwhile
if [ -e "$WHOLE" ] && ! "$PYTHON" -c "import openenv, trl" 2>/dev/null; then
  "$PYTHON" -m pip install -q --no-deps trl==1.16.0 openenv-core==0.3.0 &&
    "$PYTHON" -m pip install -q "fastmcp>=4.2" || echo "warning: the tests of TRL and OpenEnv are skipped" >&2
fi
# verifiers asks for older releases of mcp and openai than vLLM: it has an environment of its own (0.6 GB).
OWN=$(dirname "$(dirname "$PYTHON")")/verifiers
if [ -e "$WHOLE" ] && [ ! -x "$OWN/bin/vf-eval" ]; then
  "$PYTHON" -m venv "$OWN" && "$OWN/bin/python" -m pip install -q verifiers==0.4.0 ||
    echo "warning: without verifiers its test is skipped" >&2
fi
PACKAGES=(prometheus docker-compose chromium)
missing=()
for package in "${PACKAGES[@]}"; do
  dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
done
[ "${#missing[@]}" = 0 ] && exit 0
if [ "$(id -u)" != 0 ]; then
  echo "error: these packages are missing: ${missing[*]}. Install them as root: apt-get install ${missing[*]}" >&2
  exit 2
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
