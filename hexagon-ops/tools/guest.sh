#!/usr/bin/env bash
# Builds the guest program with the flags of a library and prints the path of the executable.
#
#   guest.sh LIBRARY [FEATURE]    LIBRARY: v68 v69 v73 v73q v75 v79 v81, as for skel.sh; FEATURE: replay
#
# Needs rustup with the pinned nightly and its rust-src. TARGET_DIR overrides where it is built (target/guest).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/library.sh"
need_toolchain
library_flags "$1"
target_dir=${TARGET_DIR:-$here/../../target/guest}/$1${2:+-$2}
cd "$here/guest"
RUSTFLAGS="$flags -Clink-arg=-no-pie -Crelocation-model=static" \
  cargo "+$toolchain" build --release --quiet ${2:+--features "$2"} --target hexagon-unknown-none-elf \
  -Zbuild-std=core -Zbuild-std-features=compiler-builtins-mem --target-dir "$target_dir" >&2
echo "$target_dir/hexagon-unknown-none-elf/release/hexagon-guest"
