# The commands of the project. Everything fetched or built goes into target/; scripts/ holds the work.
#
# LLAMA_CPP_DIR  a patched llama.cpp to build instead of the fetched one (patches/README.md)
# HEXAGON_QEMU   a qemu-hexagon with HVX floating point, for `make dsp` and `make vendor`
# VENDOR         rknn: `make vendor` runs the Rockchip device under Rockchip's own librknnrt 1.5.2 instead
# TAG            the tag of a release for `make notes`
# MODULE         the part of the code that `make mutants` puts faults into; all parts if not given
# HOURS          how long `make fuzz` runs each target, and `make soak` all
# MODEL          a GGUF to use instead of the fetched one
# MODELS         the models that `make models` and `make peer` count, by the names of scripts/shapes.py; all if not given
# UPDATE         1: `make models` records what it counts instead of comparing, `make windows` its output
# CHIP           the chip of the demo, such as hexagon-v75; rk3588 if not given

PYTHON ?= python3

.PHONY: help demo test test-all test-anywhere long bench model kld ops optable figures screen coverage unit lint msrv deny names results build fetch nightly dsp fuzz miri narrow sanitize mutants soak hostile batch models peer tool plugin stock dist dist-check packages-check notes newest vendor direct windows

help:
	@echo "make demo   generate text on a simulated RK3588 (CHIP=hexagon-v75: on that)"
	@echo "make test   everything that a change must pass; the last line counts it"
	@echo "make test-all  make test with every case of every chip, make dsp and make hostile; hours, before a release"
	@echo "make test-anywhere  the quick part of make test in other folders, as another user, with nonsense variables, in a bare"
	@echo "            Debian; ROWS=name: one of folder path user home variables bare"
	@echo "make long   end-to-end tests with gemma-3-270m, TinyLlama-1.1B (needs npm) and long texts on the simulated V75"
	@echo "make unit   the Rust tests alone: no network, no llama.cpp"
	@echo "make lint   format and lints of Rust, Python, C, workflows, sentences, words, comments and names, and the documentation of the code"
	@echo "make msrv   builds everything with the oldest Rust that Cargo.toml promises"
	@echo "make deny   licences, sources and security advisories of the dependencies, by cargo-deny"
	@echo "make names  type names, file names and documentation that mean several things"
	@echo "make bench  benchmarks of the library, and tokens/s in llama.cpp"
	@echo "make model  how fast MODEL would be on a Hexagon NPU, reckoned from counted packets (CHIP=hexagon-v79: on that)"
	@echo "make models packets of whole models under HEXAGON_QEMU, compared with the recorded ones; UPDATE=1 records them,"
	@echo "            MODELS=\"name ...\": of these"
	@echo "make peer   packets of llama.cpp's own backend for Hexagon at the same models' nodes; needs clang-22 and lld-22"
	@echo "make kld    KL divergence of the device, all formats, 20 chunks"
	@echo "make ops    all of upstream's test-backend-ops, on every simulated chip, and on 1 to 8 threads; hours"
	@echo "make optable  docs/results/operations.md from the log of make ops: which upstream cases the Hexagon device computes"
	@echo "make figures  charts of docs/figures and docs/results/how-good.md from the tables in the tree, and counted packets"
	@echo "            into docs/results/cost.md; make screen records the README's terminal first"
	@echo "make dsp    the Hexagon kernels and libraries built for the DSP; kernels run under HEXAGON_QEMU"
	@echo "make direct the tests of an RK3588's device without librknnrt, over two emulated kernel drivers"
	@echo "make vendor the Hexagon DSP libraries under Qualcomm's own libcdsprpc, above an emulated kernel and DSP"
	@echo "            (VENDOR=rknn: the Rockchip device under librknnrt 1.5.2, above an emulated kernel and NPU)"
	@echo "make windows  the tool for Windows under Wine, with the stand-ins; UPDATE=1 records its output"
	@echo "make fuzz   arbitrary input to each target of fuzz/, for HOURS of CPU time each; 5 minutes if not given"
	@echo "make sanitize  Rust tests with the address and the thread sanitizer; make miri: those of the thread pools in Miri"
	@echo "make coverage  lines of each crate that the Rust tests run, with floors; INSTALL=1 installs Rust's LLVM tools"
	@echo "make narrow Rust tests of the DSP's code in a build for 32 bits, as the DSP's is"
	@echo "make mutants  small faults put into the code, and how many of them the Rust tests notice; MODULE=ring: in that"
	@echo "make soak   llama-server with faults, NaN prompts and cancelled requests, HOURS=n; 15 minutes if not given"
	@echo "make hostile  every hostile file of tool/tests/hostile/ through every command of the tool"
	@echo "make batch  modelled cost of a decode step for 1 to 32 sequences"
	@echo "make tool   the command line tool, target/release/ggml-npu"
	@echo "make plugin the library that unmodified programs load, target/plugin/libggml-rust_npu.so"
	@echo "make stock  a Rust program, busy CPUs, the commands of docs/guide, operations in Debian's test-backend-ops"
	@echo "make dist   a release: tarballs for x86_64, aarch64 and Android, and packages for Python, npm and Debian, in"
	@echo "            target/dist; minutes"
	@echo "make dist-check  two builds in two folders give the same files, which work in Debian's llama.cpp"
	@echo "make packages-check  the commands of docs/guide/installing.md in empty folders and in an empty Debian (as root)"
	@echo "make notes TAG=v1.2.3  what CHANGELOG.md says of a version, for its release"
	@echo "make newest  the plugin in the newest node-llama-cpp, llama-cpp-py-sync and Debian sid of the registries"
	@echo "make results  docs/results/tables: the tables that papers print, with this project's numbers; hours. TABLE=name: one of"
	@echo "            packets speed batch quantizers scaling_awq groups rockchip answers"
	@echo "make build  the patched llama.cpp, in target/llama-0.5.0/bin"
	@echo "make fetch  only fetch and check what the others need"
	@echo "make nightly  the pinned nightly, which make dsp and make fuzz need, by rustup"

demo:
	@$(PYTHON) scripts/demo.py

test:
	@$(PYTHON) scripts/test.py

# Before a release: every case of every chip, long models, the vendor's library on every chip, every hostile file.
test-all: hostile dsp
	@$(PYTHON) scripts/test.py everything

test-anywhere:
	@$(PYTHON) scripts/anywhere.py $(ROWS)

# Variables of whoever types it that change what the backend does. Those that the scripts start are without them, too.
unit:
	@env $(addprefix -u ,$(filter GGML_% LLAMA_% OMP_%,$(.VARIABLES))) cargo test --locked --workspace --no-fail-fast

lint:
	@$(PYTHON) scripts/test.py format lint

msrv:
	@$(PYTHON) scripts/lint.py msrv

deny:
	@$(PYTHON) scripts/lint.py deny

names:
	@$(PYTHON) scripts/names.py

long:
	@$(PYTHON) scripts/test.py build long

bench:
	@$(PYTHON) scripts/bench.py

model:
	@$(PYTHON) scripts/reckon.py $(if $(CHIP),--chip $(CHIP))

models: build
	@$(PYTHON) scripts/wholes.py $(if $(UPDATE),--update) $(MODELS)
	@$(if $(UPDATE),$(PYTHON) scripts/wholes_page.py)

peer: build
	@$(PYTHON) scripts/peer.py $(MODELS)
	@$(PYTHON) scripts/wholes_page.py

kld:
	@$(PYTHON) scripts/kld.py

ops:
	@$(PYTHON) scripts/test.py build all-ops thread-ops

optable:
	@$(PYTHON) scripts/optable.py

figures:
	@$(PYTHON) scripts/figures.py
	@$(PYTHON) scripts/how_good.py

coverage:
	@$(PYTHON) scripts/coverage.py

screen: build
	@$(PYTHON) scripts/screen.py record
	@$(PYTHON) scripts/figures.py

results:
	@$(PYTHON) scripts/results.py $(TABLE)

build:
	@$(PYTHON) scripts/build.py static

fetch:
	@$(PYTHON) scripts/fetch.py

# The name is in library.sh only.
nightly:
	@rustup toolchain install $$(sed -n 's/^toolchain=//p' hexagon-ops/tools/library.sh) --profile minimal --component rust-src,miri

# Parts that the pinned nightly or the emulator is missing for are skipped with a printed reason.
dsp:
	@cargo test --release --locked -p hexagon-ops --test device --test skel --test qemu -- --ignored --nocapture

# docs/internals/vendor-loop.md has the picture; a part that is missing is skipped with a printed reason.
# VENDOR=rknn: the same page, and the licence that this accepts in scripts/vendor_rknn.py.
vendor:
	@$(PYTHON) scripts/test.py $(if $(filter rknn,$(VENDOR)),rknn-vendor,build all-vendor)

direct:
	@$(PYTHON) scripts/test.py direct

windows:
	@$(PYTHON) scripts/windows.py $(if $(UPDATE),record)

fuzz:
	@$(PYTHON) scripts/fuzz.py $(if $(HOURS),--hours $(HOURS))

sanitize:
	@$(PYTHON) scripts/sanitize.py address thread

miri:
	@$(PYTHON) scripts/sanitize.py miri

# The C library and its start files come with the target, so no compiler for 32 bits is needed.
narrow:
	@cargo test --locked --package hexagon-ops --lib --test serve --target i686-unknown-linux-musl

# Needs cargo-mutants and cargo-nextest; scripts/mutants.py has the names of modules.
mutants:
	@$(PYTHON) scripts/mutants.py $(MODULE)

soak: build
	@$(PYTHON) scripts/soak.py $(if $(HOURS),--hours $(HOURS))

batch:
	@$(PYTHON) scripts/batch.py

tool:
	@cargo build --release --locked --bin ggml-npu

plugin:
	@$(PYTHON) scripts/build.py plugin

stock:
	@$(PYTHON) scripts/test.py build stock

dist:
	@$(PYTHON) scripts/dist.py

dist-check:
	@$(PYTHON) scripts/test.py build release

notes:
	@$(PYTHON) scripts/dist.py notes $(TAG)

newest:
	@$(PYTHON) scripts/newest.py

packages-check:
	@$(PYTHON) scripts/test.py build packages

hostile:
	@cargo test --release --locked --package ggml-npu --test hostile -- --ignored --nocapture
