#include "kernels/adamw.h"
#include "simd/avx512.h"

namespace lightning_zero {

void adamw_avx512(const AdamWCoefficients& coefficients, const AdamWArrays& arrays) {
  adamw<Avx512Float>(coefficients, arrays);
}

}  // namespace lightning_zero
