# What the builds for the DSP have in common. Sourced by skel.sh and guest.sh; scripts/fuzz.py reads the nightly's name.

# The one place that names the pinned nightly.
toolchain=nightly-2026-10-15

# Ends the script with code 3 if what it builds with is not installed; every other failure is one of the build.
need_toolchain() {
  local sysroot
  if ! command -v rustup >/dev/null || ! sysroot=$(rustup run "$toolchain" rustc --print sysroot 2>/dev/null); then
    echo "$toolchain is not installed: make nightly" >&2
    exit 3
  fi
  if [ ! -d "$sysroot/lib/rustlib/src/rust/library/core" ]; then
    echo "$toolchain has no sources of the standard library: rustup component add rust-src --toolchain $toolchain" >&2
    exit 3
  fi
}

# Sets cpu and flags (for RUSTFLAGS) of the library $1. V68 and V69 have qfloat only. v73q is v73 with qfloat, for chips whose vector unit lacks IEEE arithmetic.
library_flags() {
  local float llvm=
  cpu=${1%q}
  case $1 in
    v73 | v75) float=+hvx-ieee-fp ;;
    v68 | v69 | v73q | v81) float=+hvx-qfloat ;;
    # LLVM 23's pass for qfloat writes to v30 while it is in use: docs/internals/llvm-v79-qfloat.md.
    v79) float=+hvx-qfloat llvm=-Cllvm-args=--disable-handle-qfp ;;
    *) echo "unknown library $1, want v68, v69, v73, v73q, v75, v79 or v81" >&2; exit 2 ;;
  esac
  flags="-Ctarget-cpu=hexagon$cpu -Ctarget-feature=+hvx,+hvx-length128b,+hvx$cpu,$float $llvm"
}
