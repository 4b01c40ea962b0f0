#!/usr/bin/env bash
# Builds the guest program for one architecture and prints the path of the executable.
#
#   guest.sh ARCH ARITHMETIC      ARCH: v73 v75 v79 v81 · ARITHMETIC: ieee (v73, v75 only) or qfloat
#
# Needs rustup with the pinned nightly and its rust-src. TARGET_DIR overrides where it is built (target/guest).
set -euo pipefail
arch=$1 arithmetic=$2
toolchain=nightly-2026-10-15
here=$(cd "$(dirname "$0")" && pwd)
case $arithmetic in
  ieee) float=+hvx-ieee-fp ;;
  qfloat) float=+hvx-qfloat ;;
  *) echo "guest.sh: unknown arithmetic $arithmetic, want ieee or qfloat" >&2; exit 2 ;;
esac
target_dir=${TARGET_DIR:-$here/../../target/guest}/$arch-$arithmetic
cd "$here/guest"
RUSTFLAGS="-Ctarget-cpu=hexagon$arch -Ctarget-feature=+hvx,+hvx-length128b,+hvx$arch,$float -Clink-arg=-no-pie -Crelocation-model=static" \
  cargo "+$toolchain" build --release --quiet --target hexagon-unknown-none-elf \
  -Zbuild-std=core -Zbuild-std-features=compiler-builtins-mem --target-dir "$target_dir" >&2
echo "$target_dir/hexagon-unknown-none-elf/release/hexagon-guest"
