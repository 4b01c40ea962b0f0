#!/usr/bin/env bash
# Feeds arbitrary commands to the DSP's command loop for some seconds, with libFuzzer and the address sanitizer.
#
#   fuzz.sh [SECONDS]      300 if not given; further arguments go to libFuzzer
#
# Needs the pinned nightly and a C++ compiler. TARGET_DIR overrides where it is built, and where the corpus is kept.
set -euo pipefail
seconds=${1:-300}
shift || true
toolchain=nightly-2026-10-15
triple=$(rustc -vV | sed -n 's/^host: //p')
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../fuzz"
target_dir=${TARGET_DIR:-$here/../../target/fuzz}
mkdir -p "$target_dir/corpus" artifacts
RUSTFLAGS="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
-Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing -Zsanitizer=address" \
  cargo "+$toolchain" build --release --quiet --target "$triple" --target-dir "$target_dir" --bin commands
exec "$target_dir/$triple/release/commands" -artifact_prefix=artifacts/ -max_total_time="$seconds" -max_len=4096 -len_control=0 "$@" \
  "$target_dir/corpus"
