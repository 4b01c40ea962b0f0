#!/usr/bin/env bash
# Builds OUT_DIR/qemu-hexagon, a user-mode emulator that also executes HVX floating point, from Debian's source of QEMU.
#
#   build.sh OUT_DIR      5 CPU minutes, 1.5 GB in a temporary folder; HEXAGON_QEMU=OUT_DIR/qemu-hexagon make dsp uses it
#
# Debian's own qemu-hexagon knows integer HVX only, and runs some float instructions as others without a trap.
# Needs clang-22, llvm-22, python3-venv, curl, xz-utils, a C compiler, libglib2.0-dev, zlib1g-dev, flex, bison, pkgconf.
# The mirror is the first of this machine's apt configuration.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(mkdir -p "$1" && cd "$1" && pwd)
file=qemu_10.0.13+ds.orig.tar.xz
sha256=6a0888e806c2ffc0c5f0733e974f9aea55491950d3c47c98669c8b236dde59ae
# What the program depends on: a build from the same files is not repeated.
stamp=$(cat "$here"/*.py "$here"/*.h "$here"/*.txt "$here"/build.sh | sha256sum)
[ -x "$out/qemu-hexagon" ] && [ "$(cat "$out/qemu-hexagon.stamp" 2>/dev/null)" = "$stamp" ] && { echo "$out/qemu-hexagon"; exit; }
for tool in llvm-mc-22 curl xz flex bison cc; do
  command -v $tool >/dev/null || { echo "build.sh: $tool is not installed" >&2; exit 3; }
done
mirror=$(find /etc/apt -name '*.sources' -o -name '*.list' | sort |
  xargs sed -nE 's/^(URIs: *|deb (\[[^]]*\] )?)(http[^ ]*).*/\3/p' | sed -n 1p)
[ -n "$mirror" ] || { echo "build.sh: apt has no mirror" >&2; exit 3; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
curl -fsSL -o source.tar.xz "${mirror%/}/pool/main/q/qemu/$file"
echo "$sha256  source.tar.xz" | sha256sum --check --quiet
mkdir src build
tar xf source.tar.xz -C src --strip-components=1
python3 "$here/hvx_float.py" src >&2
python3 "$here/fast_stores.py" src >&2
python3 -m venv venv
venv/bin/pip install -q --no-deps --only-binary :all: --require-hashes --requirement "$here/requirements.txt"
export PATH=$work/venv/bin:$PATH
cd build
../src/configure --python="$work/venv/bin/python3" --target-list=hexagon-linux-user --disable-system --enable-linux-user \
  --disable-tools --disable-docs --disable-capstone --disable-plugins --without-default-features --disable-install-blobs \
  --disable-debug-info --static >configure.log 2>&1 || { tail -30 configure.log >&2; exit 1; }
ninja qemu-hexagon >ninja.log 2>&1 || { tail -30 ninja.log >&2; exit 1; }
strip qemu-hexagon
# The stamp must not be beside half a copy.
part=$(mktemp "$out/.qemu-hexagon.XXXXXX")
trap 'rm -rf "$work" "$part"' EXIT
cp qemu-hexagon "$part"
chmod 755 "$part"
mv "$part" "$out/qemu-hexagon"
echo "$stamp" >"$out/qemu-hexagon.stamp"
echo "$out/qemu-hexagon"
