// 16-bit storage types. They only name a format: the vector types convert.
#pragma once

#include <cstdint>

namespace lightning_zero {

struct BFloat16 {
  std::uint16_t bits;
};

struct Float16 {
  std::uint16_t bits;
};

}  // namespace lightning_zero
