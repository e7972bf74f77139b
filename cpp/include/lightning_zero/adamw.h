// The AdamW update: what a caller passes, and the functions that the targets implement.
//
// Every pointer is a dense array of `count` elements at an address aligned to its element; arrays do not
// overlap. `param`, `exp_avg` and `exp_avg_sq` are fp32 and updated in place.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lightning_zero {

enum class DType { float32, bfloat16, float16 };

struct AdamWHyperparameters {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  std::int64_t step;  // 1 for the first update
  double grad_scale;
  bool decoupled;  // true: AdamW's decay of the parameter; false: Adam's L2 term in the gradient
};

// The scalars of one step, computed in double and rounded to fp32 once.
struct AdamWCoefficients {
  float grad_scale;
  float decay;              // factor of the parameter; 1 when the decay is not decoupled
  float l2;                 // weight of the parameter in the gradient; 0 when the decay is decoupled
  float lerp_weight;        // 1 - beta1, or -beta1 when the interpolation starts from the gradient
  bool lerp_from_gradient;  // as torch.lerp does for weights of at least one half
  float beta2;
  float one_minus_beta2;
  float sqrt_bias_correction2;
  float eps;
  float negative_step_size;  // -lr / bias_correction1
};

struct AdamWArrays {
  float* param;
  float* exp_avg;
  float* exp_avg_sq;
  const void* grad;
  DType grad_dtype;
  void* copy_out;  // receives the updated parameter in 16 bit; may be null
  DType copy_dtype;
  std::size_t count;
};

AdamWCoefficients adamw_coefficients(const AdamWHyperparameters& hyperparameters);

using AdamWFunction = void (*)(const AdamWCoefficients&, const AdamWArrays&);

// Runs `update` on pieces of the arrays, on up to `threads` threads (at least 1). Every element is computed
// as it would be alone: the result does not depend on the number of threads.
void adamw_parallel(AdamWFunction update, const AdamWCoefficients& coefficients, const AdamWArrays& arrays,
                    std::size_t threads);

void adamw_scalar(const AdamWCoefficients& coefficients, const AdamWArrays& arrays);
#ifdef LIGHTNING_ZERO_X86
void adamw_avx2(const AdamWCoefficients& coefficients, const AdamWArrays& arrays);
void adamw_avx512(const AdamWCoefficients& coefficients, const AdamWArrays& arrays);
#endif

}  // namespace lightning_zero
