#!/usr/bin/env bash
# Builds the library that FastRPC loads on the DSP, for one architecture, and prints its path.
#
#   skel.sh ARCH      ARCH: v73 v75 v79 v81
#
# Needs rustup with the pinned nightly and its rust-src, and lld (LLD: ld.lld-22). TARGET_DIR overrides where it is built.
set -euo pipefail
arch=$1
toolchain=nightly-2026-10-15
lld=${LLD:-ld.lld-22}
here=$(cd "$(dirname "$0")" && pwd)
case $arch in
  v73 | v75) float=+hvx-ieee-fp ;;
  v79 | v81) float=+hvx-qfloat ;;
  *) echo "skel.sh: unknown architecture $arch, want v73, v75, v79 or v81" >&2; exit 2 ;;
esac
command -v "$lld" >/dev/null || { echo "skel.sh: $lld is not installed" >&2; exit 3; }
target_dir=${TARGET_DIR:-$here/../../target/skel}/$arch
name=libggml_rust_npu_skel_$arch.so
cd "$here/../skel"
SKEL_ARCH=$arch RUSTFLAGS="-Ctarget-cpu=hexagon$arch -Ctarget-feature=+hvx,+hvx-length128b,+hvx$arch,$float -Crelocation-model=pic" \
  cargo "+$toolchain" build --release --quiet --target hexagon-unknown-none-elf \
  -Zbuild-std=core -Zbuild-std-features=compiler-builtins-mem --target-dir "$target_dir" >&2
"$lld" -m hexagonelf -shared -soname "$name" -Bsymbolic --hash-style=sysv -z max-page-size=4096 -z norelro \
  --build-id=none --gc-sections --strip-debug -T "$here/skel.ld" --version-script "$here/skel.map" \
  -u ggml_rust_npu_skel_handle_invoke \
  "$target_dir/hexagon-unknown-none-elf/release/libggml_rust_npu_skel.a" -o "$target_dir/$name"
python3 "$here/skel.py" "$target_dir/$name"
echo "$target_dir/$name"
