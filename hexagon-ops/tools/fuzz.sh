#!/usr/bin/env bash
# Feeds arbitrary input to a fuzz target for some seconds, with libFuzzer and the address sanitizer.
#
#   fuzz.sh [SECONDS [FOLDER TARGET]]    300, and the DSP's command loop, if not given; further arguments go to libFuzzer
#
# Needs the pinned nightly and a C++ compiler. TARGET_DIR overrides where it is built, and where the corpus is kept.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
seconds=${1:-300}
folder=${2:-$here/../fuzz}
target=${3:-commands}
shift $(($# < 3 ? $# : 3))
. "$here/library.sh"
triple=$(rustc -vV | sed -n 's/^host: //p')
target_dir=${TARGET_DIR:-$here/../../target/fuzz}
cd "$folder"
corpus=$target_dir/corpus-$target
mkdir -p "$corpus" artifacts
RUSTFLAGS="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
-Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing -Zsanitizer=address" \
  cargo "+$toolchain" build --release --quiet --target "$triple" --target-dir "$target_dir" --bin "$target"
exec "$target_dir/$triple/release/$target" -artifact_prefix=artifacts/ -max_total_time="$seconds" -max_len=4096 -len_control=0 "$@" \
  "$corpus"
