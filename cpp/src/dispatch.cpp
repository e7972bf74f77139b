#include "lightning_zero/dispatch.h"

#include <stdexcept>

#ifdef LIGHTNING_ZERO_X86
#include <cpuid.h>
#endif

namespace lightning_zero {
namespace {

bool always() { return true; }

#ifdef LIGHTNING_ZERO_X86
// __builtin_cpu_supports also checks that the operating system saves the wide registers.
bool has_avx2() {
  // F16C by CPUID: older compilers do not know its name. From the operating system it needs only AVX support.
  // Once, since each CPUID of a virtual machine takes tens of microseconds, and each kernel asks.
  static const bool f16c = [] {
    unsigned eax = 0;
    unsigned ebx = 0;
    unsigned ecx = 0;
    unsigned edx = 0;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  }();
  return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

std::string supported_names() {
  std::string names;
  for (const Target& target : compiled_targets()) {
    if (target.supported()) names += (names.empty() ? "" : ", ") + std::string(target.name);
  }
  return names;
}

}  // namespace

const std::vector<Target>& compiled_targets() {
  static const std::vector<Target> targets = {
      {"scalar", always, kScalarKernels},
#ifdef LIGHTNING_ZERO_X86
      {"avx2", has_avx2, kAvx2Kernels},
      {"avx512", has_avx512, kAvx512Kernels},
#endif
  };
  return targets;
}

const Target& resolve_target(const std::string& name) {
  const std::vector<Target>& targets = compiled_targets();
  for (auto target = targets.rbegin(); target != targets.rend(); ++target) {
    if ((name.empty() || name == target->name) && target->supported()) return *target;
  }
  throw std::invalid_argument("instruction set '" + name +
                              "' is not available; this machine and build run: " + supported_names() +
                              ". Set LIGHTNING_ZERO_ISA to one of these, or unset it to use the fastest.");
}

}  // namespace lightning_zero
