#!/bin/bash
# build.sh GGML_SRC OUT ARCH   ggml-hexagon's whole operations -> OUT/nodes-ARCH.elf; HEX_SYSROOT as for hcc
set -e
here=$(cd "$(dirname "$0")" && pwd); src=$1 out=$2 arch=$3
mkdir -p "$out"; work=$out/upstream
python3 "$here/prep.py" "$src" "$work"
h=$work/htp
"$here/hcc" "$arch" "$out/nodes-$arch.elf" "$here/nodes.c" "$here/host.cpp" "$here/libc_fast.c" \
  "$h"/{work-queue,dma-queue,htp-tensor,matmul-ops,flash-attn-ops,gated-delta-net-ops,binary-ops,unary-ops,sum-rows-ops,softmax-ops,act-ops,rope-ops,set-rows-ops,get-rows-ops,cpy-ops,repeat-ops,ssm-conv,cumsum-ops,fill-ops,concat-ops,diag-ops,solve-tri-ops,pad-ops,argsort-ops,im2col-ops,roll-ops,allreduce-ops}.c \
  -I"$here/stub" -I"$h" -I"$work" -I"$work/include" -I"$here" -fno-builtin-memset -Wno-int-conversion
