#!/bin/sh
# Builds check_main.cpp, check_index.cpp and check_plans.cpp with the sanitizers and runs it: address and undefined behaviour together, then threads.
# usage: kernels/native/check.sh [CXX]   exit status 0 when every check passed
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cxx=${1:-${CXX:-g++}}
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

flags="-std=c++20 -O1 -g -ffp-contract=off -fno-omit-frame-pointer -Wall -Wextra -Wno-psabi"
for kind in address,undefined thread; do
    objects=""
    compilers=""
    for name in paged pool memory crc copies digests lz4 plans plan_pieces plan_threads levels level_portable level_avx2 level_avx512 index index_memory index_reader check_index check_index_reader check_plans check_main; do
        more=""
        if [ "$(uname -m)" = x86_64 ]; then
            case $name in
                level_avx2) more="-mavx2 -mfma -mf16c" ;;
                level_avx512) more="-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mfma -mf16c" ;;
            esac
        fi
        # The compiler's own AVX-512 header reads vectors that it calls undefined; that warning is not about this code.
        # shellcheck disable=SC2086
        "$cxx" $flags $more -Wno-uninitialized -Wno-maybe-uninitialized -fsanitize=$kind -fno-sanitize-recover=all \
            -c "$here/$name.cpp" -o "$build/$name.o" &
        compilers="$compilers $!"
        objects="$objects $build/$name.o"
    done
    for compiler in $compilers; do
        wait "$compiler"
    done
    # shellcheck disable=SC2086
    "$cxx" -fsanitize=$kind $objects -pthread -o "$build/check"
    echo "sanitizer: $kind"
    "$build/check"
done
