#include "lightning_zero/adamw.h"

#include <cmath>

namespace lightning_zero {

AdamWCoefficients adamw_coefficients(const AdamWHyperparameters& h) {
  const double step = static_cast<double>(h.step);
  const double bias_correction1 = 1.0 - std::pow(h.beta1, step);
  const double bias_correction2 = 1.0 - std::pow(h.beta2, step);
  const float weight = static_cast<float>(1.0 - h.beta1);

  AdamWCoefficients c{};
  c.grad_scale = static_cast<float>(h.grad_scale);
  c.decay = h.decoupled ? static_cast<float>(1.0 - h.lr * h.weight_decay) : 1.0F;
  c.l2 = h.decoupled ? 0.0F : static_cast<float>(h.weight_decay);
  c.lerp_from_gradient = weight >= 0.5F;
  c.lerp_weight = c.lerp_from_gradient ? weight - 1.0F : weight;
  c.beta2 = static_cast<float>(h.beta2);
  c.one_minus_beta2 = static_cast<float>(1.0 - h.beta2);
  c.sqrt_bias_correction2 = static_cast<float>(std::pow(bias_correction2, 0.5));
  c.eps = static_cast<float>(h.eps);
  c.negative_step_size = static_cast<float>(-(h.lr / bias_correction1));
  return c;
}

}  // namespace lightning_zero
