#include "kernels/adamw.h"
#include "simd/scalar.h"

namespace lightning_zero {

void adamw_scalar(const AdamWCoefficients& coefficients, const AdamWArrays& arrays) {
  adamw<ScalarFloat>(coefficients, arrays);
}

}  // namespace lightning_zero
