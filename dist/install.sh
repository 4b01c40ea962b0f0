#!/bin/sh
# Installs ggml-rust-npu from the folder of this script, and says how a program finds it.
#
#   install.sh [--prefix FOLDER] [--into FOLDER] [--remove]
#
# --prefix  where to install: $PREFIX in Termux, /usr/local for root, ~/.local for others
# --into    a folder in which a llama.cpp looks for its backends (it has libggml-cpu*.so). The plugin is linked there
#           under a name that ggml looks for, so that no variable is needed. Without it, the folder of the llama-cli or
#           llama-server in PATH is taken if it can be written to.
# --remove  removes what an earlier call with the same options installed
set -eu

here=$(cd "$(dirname "$0")" && pwd)
plugin=libggml-rust_npu.so
# ggml looks for backends of fixed names only; this one is that of ggml's own backend for Hexagon.
known_name=libggml-hexagon.so

fail() {
  echo "install.sh: $1" >&2
  exit 1
}

prefix= into= remove=
while [ $# -gt 0 ]; do
  case $1 in
    --prefix | --into)
      [ $# -ge 2 ] || fail "$1 needs a folder"
      if [ "$1" = --prefix ]; then prefix=$2; else into=$2; fi
      shift 2
      ;;
    --remove) remove=yes && shift ;;
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit 0 ;;
    *) fail "unknown option $1; --help lists them" ;;
  esac
done

if [ -z "$prefix" ]; then
  case ${PREFIX:-} in
    */com.termux/*) prefix=$PREFIX ;;
    *) if [ "$(id -u)" = 0 ]; then prefix=/usr/local; else prefix=$HOME/.local; fi ;;
  esac
fi
case $prefix in /*) ;; *) prefix=$PWD/$prefix ;; esac
lib=$prefix/lib/ggml-rust-npu

# Prints the folder in which the llama.cpp of PATH looks for its backends; nothing if it has them inside.
folder_of_backends() {
  program=$(command -v llama-cli || command -v llama-server || command -v llama-bench) || return 0
  folder=$(dirname "$(readlink -f "$program")")
  for each in "$folder" "$(dirname "$folder")"/lib/ggml/backends* "$(dirname "$folder")"/lib/*/ggml/backends*; do
    for file in "$each"/libggml-cpu*.so; do
      [ -e "$file" ] && echo "$each" && return 0
    done
  done
  return 0
}

if [ -n "$remove" ]; then
  for folder in "$into" "$(folder_of_backends)"; do
    if [ -n "$folder" ] && [ "$(readlink "$folder/$known_name" || true)" = "$lib/$plugin" ]; then
      rm -f "$folder/$known_name"
    fi
  done
  rm -rf "$lib"
  rm -f "$prefix/bin/ggml-npu" "$prefix/share/man/man1/ggml-npu.1" "$prefix/share/man/man1"/ggml-npu-*.1 \
    "$prefix/share/bash-completion/completions/ggml-npu" "$prefix/share/zsh/site-functions/_ggml-npu" \
    "$prefix/share/fish/vendor_completions.d/ggml-npu.fish"
  echo "removed $lib and $prefix/bin/ggml-npu"
  exit 0
fi

if command -v sha256sum >/dev/null; then
  (cd "$here" && sha256sum -c SHA256SUMS >/dev/null 2>&1) || fail "a file is missing or damaged: cd $here && sha256sum -c SHA256SUMS"
fi

# A tarball for Android has these only if it was made with an NDK.
lacks=
for file in "lib/$plugin" bin/ggml-npu; do
  [ -f "$here/$file" ] || lacks="$lacks $file"
done
[ -z "$lacks" ] || fail "nothing to install: this tarball lacks$lacks; README.md says how to link the static library"
if [ -n "$into" ] && [ ! -d "$into" ]; then
  fail "--into names no folder: $into"
fi

# Writes a copy of file $1 as $2. A program may have the old file open, so that one is replaced and not changed.
put() {
  new=$2.new
  if ! error=$({ cp "$1" "$new" && mv -f "$new" "$2"; } 2>&1); then
    rm -f "$new" 2>/dev/null || true
    fail "$2 was not written: $error"
  fi
}

# Libraries for the DSP are found beside the plugin.
mkdir -p "$lib" "$prefix/bin"
for file in "$here/lib"/*.so; do
  put "$file" "$lib/$(basename "$file")"
done
put "$here/bin/ggml-npu" "$prefix/bin/ggml-npu"
# Manual pages, and completions for shells.
if [ -d "$here/share" ]; then
  (cd "$here/share" && find . -type f) | while read -r file; do
    mkdir -p "$(dirname "$prefix/share/$file")"
    put "$here/share/$file" "$prefix/share/$file"
  done
fi
echo "installed $lib/$plugin and $prefix/bin/ggml-npu"

found=$into
[ -n "$found" ] || found=$(folder_of_backends)
linked=
if [ -n "$found" ]; then
  place=$found/$known_name
  link=$(readlink "$place" || true)
  case $link in
    "$lib/$plugin") ;;
    # With one of an earlier installation elsewhere, a program would load two plugins.
    */ggml-rust-npu/$plugin) rm -f "$place" 2>/dev/null || fail "$place, a link of an earlier installation, cannot be replaced" ;;
  esac
  if [ "$link" = "$lib/$plugin" ]; then
    linked=yes
  elif [ -L "$place" ] || [ -e "$place" ] || [ -n "$(ls "$found" | grep '^libggml-hexagon-.*\.so$' || true)" ]; then
    echo "$found has ggml's own backend for Hexagon, whose place is left to it"
  elif [ -w "$found" ]; then
    ln -s "$lib/$plugin" "$place"
    linked=yes
  elif [ -n "$into" ]; then
    fail "no permission to write to $into"
  fi
fi
if [ -n "$linked" ]; then
  echo "programs with the backends in $found load it as $known_name; no variable is needed"
else
  echo "programs with ggml load it if this variable is set:"
  echo "  export GGML_BACKEND_PATH=$lib/$plugin"
fi
if [ "$(uname -m)" = aarch64 ] && [ -n "$(find "$lib" -name 'libggml_rust_npu_skel_*.so')" ]; then
  echo "ggml-npu, and programs with the backend linked in, find the DSP's libraries on a Snapdragon with:"
  echo "  export DSP_LIBRARY_PATH=$lib"
fi
