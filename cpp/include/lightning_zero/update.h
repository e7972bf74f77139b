// One optimizer step over dense arrays in host memory: what a caller passes, and the coefficients of each
// rule.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lightning_zero {

// int8: the codes of state in blocks (blocks.h).
enum class DType { float32, bfloat16, float16, int8 };

constexpr std::size_t item_size(DType dtype) {
  if (dtype == DType::int8) return 1;
  return dtype == DType::float32 ? 4 : 2;
}

// How an fp32 number becomes bf16 when it lies exactly between two of them.
enum class Ties { even, away };

constexpr std::size_t kMaxStates = 3;

// Arrays of `count` elements, each at an address aligned to its element; they do not overlap.
struct UpdateArrays {
  // fp32: the master itself. 16 bit: the high part of a split master, whose low part is `remainder`.
  void* param;
  DType param_dtype;
  std::int16_t* remainder;
  void* copy_out;  // for an fp32 master: receives it in 16 bit; may be null
  DType copy_dtype;
  Ties copy_ties;
  const void* grad;
  DType grad_dtype;
  void* states[kMaxStates];  // as many as the rule has
  DType state_dtype;         // float32; bfloat16 or int8, rounded stochastically
  std::size_t count;
  // Of int8 states: one for each block of elements whose indices (see RoundingKey) fall into it.
  std::uint8_t* scales[kMaxStates] = {};
};

// Stochastic rounding depends on these numbers and on nothing else.
struct RoundingKey {
  std::uint64_t seed;
  std::uint64_t step;
  std::uint64_t index;  // of the first element; the others count on from it
};

// The part of a RoundingKey that a run of elements shares whose indices agree in their upper 32 bits.
struct RoundingStream {
  std::uint32_t before;
  std::uint32_t between;
  std::uint32_t first;  // lower 32 bits of the first element's index
};

// The scalars of one step, computed in double and rounded to fp32 once. In all of them the gradient is
// multiplied by `grad_scale` first (negative to maximize); `l2` is the weight of the parameter in the
// gradient, `decay` the part of the parameter that decoupled weight decay adds to the update (zero or
// negative).

struct AdamCoefficients {
  float grad_scale;
  float l2;
  float decay;
  float lerp_weight;        // 1 - beta1, or -beta1 when the interpolation starts from the gradient
  bool lerp_from_gradient;  // as torch.lerp does for weights of at least one half
  float beta2;
  float one_minus_beta2;
  // With numerator and denominator of the update multiplied by sqrt(bias_correction2), it needs no division
  // by it.
  float eps;
  float negative_step_size;  // -lr / bias_correction1
  bool amsgrad;
};

struct AdagradCoefficients {
  float grad_scale;
  float l2;
  float eps;
  float negative_lr;  // with the learning rate's own decay
};

struct LionCoefficients {
  float grad_scale;
  float decay;
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float negative_lr;
};

struct SgdCoefficients {
  float grad_scale;
  float l2;
  float momentum;  // 0: the rule has no state
  float one_minus_dampening;
  float negative_lr;
  bool nesterov;
  bool first;  // the momentum buffer starts as the gradient
};

// `weight_decay` is AdamW's when `decoupled`, else Adam's L2 term. `step` counts from 1.
AdamCoefficients adam_coefficients(double lr, double beta1, double beta2, double eps, double weight_decay,
                                   std::int64_t step, double grad_scale, bool decoupled, bool amsgrad);
AdagradCoefficients adagrad_coefficients(double lr, double lr_decay, double eps, double weight_decay,
                                         std::int64_t step, double grad_scale);
LionCoefficients lion_coefficients(double lr, double beta1, double beta2, double weight_decay,
                                   double grad_scale);
SgdCoefficients sgd_coefficients(double lr, double momentum, double dampening, bool nesterov,
                                 double weight_decay, bool first, double grad_scale);

// The update of one piece by one target. `stream`: write `copy_out` past the caches.
template <class Coefficients>
using UpdateFunction = void (*)(const Coefficients&, const UpdateArrays&, const RoundingStream&, bool stream);

// Runs `update` on pieces of the arrays, on up to `threads` threads (at least 1). Every element is computed
// as it would be alone: the result does not depend on the number of threads. The floating-point environment
// is the default one meanwhile, whatever the caller's flushes or traps.
template <class Coefficients>
void update_parallel(UpdateFunction<Coefficients> update, const Coefficients& coefficients,
                     const UpdateArrays& arrays, const RoundingKey& key, std::size_t threads);

}  // namespace lightning_zero
