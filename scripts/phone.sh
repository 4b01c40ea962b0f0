#!/bin/sh
# Runs ggml-npu on an Android phone, and prints what it prints.
#
#   phone.sh [arguments of ggml-npu]     devices --probe if there are none
#
# TOOL    ggml-npu for Android; target/aarch64-linux-android/release/ggml-npu if not given
# SKEL    folder with the libraries for the DSP; target/skel if not given
# FOLDER  where to put them on the phone; /data/local/tmp/npu if not given
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
tool=${TOOL:-$root/target/aarch64-linux-android/release/ggml-npu}
skel=${SKEL:-$root/target/skel}
folder=${FOLDER:-/data/local/tmp/npu}

fail() {
  echo "phone.sh: $1" >&2
  exit 1
}

command -v adb >/dev/null || fail "adb is not installed"
[ -f "$tool" ] || fail "no $tool; docs/guide/phone.md builds it, or TOOL names it"
libraries=$(find "$skel" -name 'libggml_rust_npu_skel_v*.so' 2>/dev/null | sort)
[ -n "$libraries" ] || fail "no library for the DSP in $skel; make dsp builds them, or SKEL names their folder"

adb shell "mkdir -p '$folder'" >&2
echo "$libraries" | while IFS= read -r library; do
  # adb reads standard input.
  adb push "$library" "$folder/" </dev/null >&2
done
adb push "$tool" "$folder/ggml-npu" >&2
[ $# -gt 0 ] || set -- devices --probe
arguments=
for argument; do
  arguments="$arguments '$(printf %s "$argument" | sed "s/'/'\\\\''/g")'"
done
# FastRPC reads DSP_LIBRARY_PATH at its first call. With the vendor's folders in LD_LIBRARY_PATH sessions failed to open.
adb shell "cd '$folder' && chmod 755 ggml-npu && unset LD_LIBRARY_PATH && DSP_LIBRARY_PATH='$folder' ./ggml-npu$arguments"
