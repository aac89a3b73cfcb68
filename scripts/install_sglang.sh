#!/usr/bin/env bash
# Make SGLang's own environment, .venv-sglang: it wants other versions of torch and of a few packages than asyncrl and
# vLLM. Versions are those that were run together.
#   On a CPU: sglang 0.5.23 without the requirements that are built for CUDA, beside the torch and transformers of the
#   main environment, and asyncrl's stand-in for its compiled kernels (asyncrl_plugins/sglang/kernel_stand_in.py).
#   Where there is an NVIDIA driver: sglang as it is released, with its torch and its kernels. That has not been run.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"
VENV="${VENV:-.venv-sglang}"
SGLANG=0.5.23 # and in scripts/requirements_sglang.txt
TORCH=2.13.0
TORCHVISION=0.28.0
TRANSFORMERS=5.19.0
if [ -z "${DEVICE:-}" ]; then
  if command -v nvidia-smi >/dev/null 2>&1; then DEVICE=cuda; else DEVICE=cpu; fi
fi
CPU_INDEX=https://download.pytorch.org/whl/cpu

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }
pip --version >/dev/null 2>&1 || "$PYTHON" -m venv "$VENV"
echo "asyncrl: installing SGLang $SGLANG for $DEVICE in $VENV, some minutes"

if [ "$DEVICE" = cuda ]; then
  pip install -q "sglang==$SGLANG" "transformers==$TRANSFORMERS"
else
  pip install -q --no-deps "torch==$TORCH+cpu" 2>/dev/null || pip install -q --no-deps --index-url "$CPU_INDEX" "torch==$TORCH"
  pip install -q --no-deps "torchvision==$TORCHVISION" -r scripts/requirements_sglang.txt
  SITE="$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
  cp asyncrl/processing/torchvision_cpu.py "$SITE/_asyncrl_torchvision_cpu.py"
  echo "import _asyncrl_torchvision_cpu" > "$SITE/_asyncrl_torchvision_cpu.pth"
  if ! "$VENV/bin/python" -c "import importlib.metadata as m; m.version('sglang-kernel')" 2>/dev/null; then
    mkdir -p "$SITE/sgl_kernel"
    cp asyncrl_plugins/sglang/kernel_stand_in.py "$SITE/sgl_kernel/__init__.py"
    echo "asyncrl: there are no compiled kernels of SGLang for a CPU: a stand-in takes their place, and computes in torch"
  fi
fi
"$VENV/bin/python" - <<'PY'
import importlib.metadata as m
print("SGLang is installed:", ", ".join(f"{name} {m.version(name)}" for name in ("sglang", "torch", "transformers")))
PY
