// 16-bit storage types. They only name a format; formats.h and the vector types convert.
#pragma once

#include <cstdint>

namespace lightning_zero {

struct BFloat16 {
  std::uint16_t bits;
};

// bf16 that is rounded to nearest with ties away from zero when it is stored.
struct BFloat16Away {
  std::uint16_t bits;
};

struct Float16 {
  std::uint16_t bits;
};

}  // namespace lightning_zero
