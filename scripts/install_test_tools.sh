#!/usr/bin/env bash
# Debian packages that some tests need, which are skipped without them: Prometheus with promtool, docker-compose, Chromium.
set -euo pipefail
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
