// Whether this processor has the instruction sets that the kernels of a name are compiled for.
#include "../isa/isa.h"

#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#define SUPPORTS(isa) extern "C" __attribute__((visibility("default"))) int EXPORTED(supports_##isa)()

#if defined(__aarch64__)
SUPPORTS(neon) { return 1; }
SUPPORTS(neon_bf16) {
  constexpr unsigned long DOT_PRODUCTS = 1 << 20, BF16 = 1 << 14;  // of AT_HWCAP and AT_HWCAP2
  return (getauxval(AT_HWCAP) & DOT_PRODUCTS) && (getauxval(AT_HWCAP2) & BF16);
}
#else
SUPPORTS(avx2) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
SUPPORTS(avx512) {
  return EXPORTED(supports_avx2)() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
SUPPORTS(avx512_bf16) {
  return EXPORTED(supports_avx512)() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}
// Linux lets a process use tiles that asks for them. Not all compilers know these features by a name.
SUPPORTS(avx512_amx) {
  constexpr unsigned AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24, ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
  unsigned a, b, c, d = 0;
  return EXPORTED(supports_avx512_bf16)() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & AMX_BF16) && (d & AMX_TILE) &&
         syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}
#endif
#undef SUPPORTS
