# Included by CMake after ggml's own project(): its folder is compiled with full optimization whatever the programs have.
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")
