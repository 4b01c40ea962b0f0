#!/usr/bin/env bash
# Builds a library that FastRPC loads on the DSP and prints its path.
#
#   skel.sh LIBRARY      LIBRARY: v68 v69 v73 v73q v75 v79 v81; v73q is v73 with qfloat
#
# Needs rustup with the pinned nightly and its rust-src, whose lld it links with. TARGET_DIR overrides where it is built;
# SKEL_RUSTFLAGS has more flags for rustc.
set -euo pipefail
library=$1
here=$(cd "$(dirname "$0")" && pwd)
. "$here/library.sh"
need_toolchain
library_flags "$library"
target_dir=${TARGET_DIR:-$here/../../target/skel}/$library
name=libggml_rust_npu_skel_$library.so
cd "$here/../skel"
SKEL_ARCH=$cpu RUSTFLAGS="$flags -Crelocation-model=pic ${SKEL_RUSTFLAGS:-}" \
  cargo "+$toolchain" build --release --quiet --target hexagon-unknown-none-elf \
  -Zbuild-std=core -Zbuild-std-features=compiler-builtins-mem --target-dir "$target_dir" >&2
lld=$(rustc "+$toolchain" --print target-libdir)/../bin/rust-lld
"$lld" -flavor gnu -m hexagonelf -shared -soname "$name" -Bsymbolic --hash-style=sysv -z max-page-size=4096 -z norelro \
  --build-id=none --gc-sections --strip-debug -T "$here/skel.ld" --version-script "$here/skel.map" \
  -u ggml_rust_npu_skel_handle_invoke \
  "$target_dir/hexagon-unknown-none-elf/release/libggml_rust_npu_skel.a" -o "$target_dir/$name.$$"
python3 "$here/skel.py" "$target_dir/$name.$$"
# At once: another build of the same library must not find half of this one.
mv "$target_dir/$name.$$" "$target_dir/$name"
echo "$target_dir/$name"
