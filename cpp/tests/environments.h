// Floating-point environments that a caller may have set.
#pragma once

#include <cfenv>
#ifdef LIGHTNING_ZERO_X86
#include <immintrin.h>
#endif

namespace lightning_zero {

// Makes subnormal numbers zero when they are read and when they are written, like torch.set_flush_denormal.
inline void flush_subnormals() {
#ifdef LIGHTNING_ZERO_X86
  _mm_setcsr(_mm_getcsr() | 0x8040U);
#endif
}

// Changes everything that a result could depend on, until the end of the scope.
class HostileFloatingPoint {
 public:
  HostileFloatingPoint() {
    std::fegetenv(&before_);
    std::fesetround(FE_UPWARD);
    flush_subnormals();
  }
  ~HostileFloatingPoint() { std::fesetenv(&before_); }
  HostileFloatingPoint(const HostileFloatingPoint&) = delete;
  HostileFloatingPoint& operator=(const HostileFloatingPoint&) = delete;

 private:
  std::fenv_t before_;
};

}  // namespace lightning_zero
