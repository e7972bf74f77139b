// One optimizer step over dense arrays in host memory: the arguments, and the coefficients of each rule.
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

// The rounding of an fp32 number exactly halfway between two bf16 numbers: to even, or away from zero.
enum class Ties { even, away };

constexpr std::size_t kMaxStates = 3;

// Arrays of `count` elements at element-aligned addresses; they must not overlap.
struct UpdateArrays {
  // fp32: the master itself. 16 bits: the high part of a split master, whose low part is `remainder`.
  void* param;
  DType param_dtype;
  std::int16_t* remainder;
  void* copy_out;  // receives a 16-bit copy of an fp32 master; may be null
  DType copy_dtype;
  Ties copy_ties;
  const void* grad;
  DType grad_dtype;
  void* states[kMaxStates];  // the rule determines how many are used
  DType state_dtype;         // float32; bfloat16 or int8, rounded stochastically
  std::size_t count;
  // The scales of int8 states, one per block; the indices of elements (see RoundingKey) determine the blocks.
  std::uint8_t* scales[kMaxStates] = {};
};

// The numbers that determine stochastic rounding.
struct RoundingKey {
  std::uint64_t seed;
  std::uint64_t step;
  std::uint64_t index;  // index of the first element; those of the others follow
};

// A RoundingKey for consecutive elements whose indices have the same upper 32 bits.
struct RoundingStream {
  std::uint32_t before;
  std::uint32_t between;
  std::uint32_t first;  // lower 32 bits of the first element's index
};

// The scalars of one step, computed in double and rounded to fp32 once. The gradient is first multiplied by
// `grad_scale` (negative to maximize). `l2` times the parameter is added to the gradient. `decay` (zero or
// negative) times the parameter is added to the update, for decoupled weight decay.

struct AdamCoefficients {
  float grad_scale;
  float l2;
  float decay;
  float lerp_weight;        // 1 - beta1, or -beta1 when the interpolation starts from the gradient
  bool lerp_from_gradient;  // as torch.lerp does for weights of at least one half
  float beta2;
  float one_minus_beta2;
  // These two include the factor sqrt(bias_correction2), by which numerator and denominator of the update are
  // multiplied, so that the kernel need not divide by it.
  float eps;
  float negative_step_size;  // -lr / bias_correction1
  bool amsgrad;
};

struct AdagradCoefficients {
  float grad_scale;
  float l2;
  float eps;
  float negative_lr;  // includes the decay of the learning rate
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
  bool first;  // initialize the momentum buffer with the gradient
};

// `weight_decay` is AdamW's if `decoupled`, otherwise the weight of Adam's L2 term. `step` counts from 1.
AdamCoefficients adam_coefficients(double lr, double beta1, double beta2, double eps, double weight_decay,
                                   std::int64_t step, double grad_scale, bool decoupled, bool amsgrad);
AdagradCoefficients adagrad_coefficients(double lr, double lr_decay, double eps, double weight_decay,
                                         std::int64_t step, double grad_scale);
LionCoefficients lion_coefficients(double lr, double beta1, double beta2, double weight_decay,
                                   double grad_scale);
SgdCoefficients sgd_coefficients(double lr, double momentum, double dampening, bool nesterov,
                                 double weight_decay, bool first, double grad_scale);

// The update of one piece, by one target. With `stream`, `copy_out` is written with stores that bypass the
// caches.
template <class Coefficients>
using UpdateFunction = void (*)(const Coefficients&, const UpdateArrays&, const RoundingStream&, bool stream);

// Runs `update` on pieces of the arrays, on up to `threads` threads (at least 1). Elements are computed
// independently, so that the result does not depend on the number of threads. The default floating-point
// environment is used, whatever the caller has set.
template <class Coefficients>
void update_parallel(UpdateFunction<Coefficients> update, const Coefficients& coefficients,
                     const UpdateArrays& arrays, const RoundingKey& key, std::size_t threads);

}  // namespace lightning_zero
