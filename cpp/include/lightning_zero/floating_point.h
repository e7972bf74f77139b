// The floating-point environment of a kernel.
#pragma once

#include <cfenv>

namespace lightning_zero {

// During its lifetime the calling thread rounds to nearest and keeps subnormal numbers. Callers may have
// changed this (torch.set_flush_denormal), and threads of the pool inherit the settings of the thread that
// made them.
class DefaultFloatingPoint {
 public:
  DefaultFloatingPoint() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatingPoint() { std::fesetenv(&before_); }
  DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
  DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;

 private:
  std::fenv_t before_;
};

}  // namespace lightning_zero
