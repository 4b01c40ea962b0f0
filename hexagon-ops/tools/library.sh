# What the builds for the DSP have in common. Sourced by skel.sh and guest.sh; scripts/fuzz.py reads the nightly's name.

# The one place that names the pinned nightly.
toolchain=nightly-2026-10-15

# Sets cpu and flags (for RUSTFLAGS) of the library $1. v73q is v73 with qfloat, for chips whose vector unit lacks IEEE arithmetic.
library_flags() {
  local float llvm=
  cpu=${1%q}
  case $1 in
    v73 | v75) float=+hvx-ieee-fp ;;
    v73q | v81) float=+hvx-qfloat ;;
    # LLVM 23's pass for qfloat writes to v30 while it is in use: docs/internals/llvm-v79-qfloat.md.
    v79) float=+hvx-qfloat llvm=-Cllvm-args=--disable-handle-qfp ;;
    *) echo "unknown library $1, want v73, v73q, v75, v79 or v81" >&2; exit 2 ;;
  esac
  flags="-Ctarget-cpu=hexagon$cpu -Ctarget-feature=+hvx,+hvx-length128b,+hvx$cpu,$float $llvm"
}
