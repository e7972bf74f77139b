#include "kernels/adamw.h"
#include "simd/avx2.h"

namespace lightning_zero {

void adamw_avx2(const AdamWCoefficients& coefficients, const AdamWArrays& arrays) {
  adamw<Avx2Float>(coefficients, arrays);
}

}  // namespace lightning_zero
