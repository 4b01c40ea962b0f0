# What a newcomer needs. Everything fetched or built goes into target/; scripts/ holds the work.
#
# LLAMA_CPP_DIR  a patched llama.cpp to build in place of the fetched one (patches/README.md)
# MODEL          a GGUF to use in place of the fetched one

PYTHON ?= python3

.PHONY: help demo test bench kld build fetch

help:
	@echo "make demo   generate text on a simulated RK3588"
	@echo "make test   all tests; the last line counts them"
	@echo "make bench  benchmarks of the library, and tokens/s in llama.cpp"
	@echo "make kld    KL divergence of the device, all formats, 20 chunks"
	@echo "make build  the patched llama.cpp, in target/llama-0.5.0/bin"
	@echo "make fetch  only fetch and check what the others need"

demo:
	@$(PYTHON) scripts/demo.py

test:
	@$(PYTHON) scripts/test.py

bench:
	@$(PYTHON) scripts/bench.py

kld:
	@$(PYTHON) scripts/kld.py

build:
	@$(PYTHON) scripts/build.py static

fetch:
	@$(PYTHON) scripts/fetch.py
