// bcryptprimitives.dll, which Wine 8.0 does not have, with the function that
// Rust's standard library imports from it.

#include <windows.h>

// RtlGenRandom, of advapi32.
BOOLEAN NTAPI SystemFunction036(PVOID data, ULONG bytes);

__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE data, SIZE_T bytes) {
  return bytes <= MAXDWORD && SystemFunction036(data, (ULONG)bytes);
}
