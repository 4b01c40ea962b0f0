#!/bin/sh
# A wrapper of rustc (RUSTC_WRAPPER) that gives this project's crates on the DSP the same symbols in every folder.
#
# cargo hashes a crate's folder into `-C metadata`, and rustc that into symbols: relative to the workspace, but these crates
# are outside of the DSP's.
set -eu

rustc=$1
shift
name= previous=
for argument; do
  [ "$previous" = --crate-name ] && name=$argument
  previous=$argument
done
case $name in
  hexagon_ops | sim_common | task_pool | ggml_rust_npu_skel)
    for argument; do
      shift
      case $argument in metadata=*) argument=metadata=$name ;; esac
      set -- "$@" "$argument"
    done
    ;;
esac
exec "$rustc" "$@"
