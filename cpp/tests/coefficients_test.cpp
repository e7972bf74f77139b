// The scalars of a step.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "lightning_zero/update.h"

namespace lightning_zero {
namespace {

AdamCoefficients adam(double beta1, double beta2, std::int64_t step, bool decoupled = true) {
  return adam_coefficients(0.5, beta1, beta2, 1e-8, 0.25, step, -2.0, decoupled, false);
}

TEST(AdamCoefficientsTest, CorrectsTheBiasOfTheFirstStep) {
  const AdamCoefficients c = adam(0.9, 0.999, 1);
  // Numerator and denominator of the update include the factor of the root of the second correction.
  EXPECT_EQ(c.negative_step_size, static_cast<float>(-(0.5 / (1.0 - 0.9)) * std::sqrt(1.0 - 0.999)));
  EXPECT_EQ(c.eps, static_cast<float>(1e-8 * std::sqrt(1.0 - 0.999)));
}

TEST(AdamCoefficientsTest, NeedsNoCorrectionAfterManySteps) {
  for (const std::int64_t step :
       {std::int64_t{100000}, std::int64_t{1} << 40, std::numeric_limits<std::int64_t>::max()}) {
    const AdamCoefficients c = adam(0.9, 0.999, step);
    EXPECT_EQ(c.negative_step_size, -0.5F) << step;
    EXPECT_EQ(c.eps, 1e-8F) << step;
  }
}

TEST(AdamCoefficientsTest, CountsStepsBeyond32Bits) {
  // With a beta so close to 1, a truncated step number would change the result.
  const double beta = 1.0 - 0x1p-40;
  const std::int64_t step = (std::int64_t{1} << 38) + 1;
  EXPECT_NEAR(adam(0.9, beta, step).eps, 1e-8 * std::sqrt(-std::expm1(-0.25)), 1e-14);
}

TEST(AdamCoefficientsTest, InterpolatesFromTheNearerEnd) {
  EXPECT_FALSE(adam(0.9, 0.999, 1).lerp_from_gradient);
  EXPECT_EQ(adam(0.9, 0.999, 1).lerp_weight, static_cast<float>(1.0 - 0.9));
  EXPECT_TRUE(adam(0.5, 0.999, 1).lerp_from_gradient);
  EXPECT_EQ(adam(0.5, 0.999, 1).lerp_weight, -0.5F);
  EXPECT_TRUE(adam(0.0, 0.999, 1).lerp_from_gradient);
  EXPECT_EQ(adam(0.0, 0.999, 1).lerp_weight, 0.0F);
}

TEST(AdamCoefficientsTest, WithoutAveragesNothingIsCorrected) {
  const AdamCoefficients c = adam(0.0, 0.0, 1);
  EXPECT_EQ(c.negative_step_size, -0.5F);
  EXPECT_EQ(c.eps, 1e-8F);
  EXPECT_EQ(c.one_minus_beta2, 1.0F);
}

TEST(AdamCoefficientsTest, DecaysWeightsInOneOfTwoPlaces) {
  EXPECT_EQ(adam(0.9, 0.999, 1, true).decay, -0.125F);
  EXPECT_EQ(adam(0.9, 0.999, 1, true).l2, 0.0F);
  EXPECT_EQ(adam(0.9, 0.999, 1, false).decay, 0.0F);
  EXPECT_EQ(adam(0.9, 0.999, 1, false).l2, 0.25F);
}

TEST(AdamCoefficientsTest, RoundsTheDifferenceOnce) {
  // If beta2 were rounded first, 1 - beta2 would be 0.00100001.
  EXPECT_EQ(adam(0.9, 0.999, 1).one_minus_beta2, static_cast<float>(1.0 - 0.999));
  EXPECT_NE(adam(0.9, 0.999, 1).one_minus_beta2, 1.0F - 0.999F);
}

TEST(AdamCoefficientsTest, PassesTheRestOn) {
  const AdamCoefficients c = adam_coefficients(0.5, 0.9, 0.999, 1e-8, 0.25, 1, -2.0, true, true);
  EXPECT_TRUE(c.amsgrad);
  EXPECT_EQ(c.grad_scale, -2.0F);
  EXPECT_EQ(c.beta2, 0.999F);
}

TEST(AdagradCoefficientsTest, LearningRateDecaysFromTheFirstStepOn) {
  EXPECT_EQ(adagrad_coefficients(0.5, 1.0, 0.0, 0.0, 1, 1.0).negative_lr, -0.5F);
  EXPECT_EQ(adagrad_coefficients(0.5, 1.0, 0.0, 0.0, 4, 1.0).negative_lr, -0.125F);
  EXPECT_EQ(adagrad_coefficients(0.5, 1.0, 0.0, 0.0, (std::int64_t{1} << 40) + 1, 1.0).negative_lr,
            static_cast<float>(-(0.5 / (1.0 + 0x1p40))));
}

TEST(LionCoefficientsTest, HasDecayAndBothAverages) {
  const LionCoefficients c = lion_coefficients(0.5, 0.9, 0.99, 0.25, -2.0);
  EXPECT_EQ(c.decay, -0.125F);
  EXPECT_EQ(c.negative_lr, -0.5F);
  EXPECT_EQ(c.one_minus_beta1, static_cast<float>(1.0 - 0.9));
  EXPECT_EQ(c.one_minus_beta2, static_cast<float>(1.0 - 0.99));
  EXPECT_EQ(c.grad_scale, -2.0F);
}

TEST(SgdCoefficientsTest, HasMomentumAndDampening) {
  const SgdCoefficients c = sgd_coefficients(0.5, 0.9, 0.25, false, 0.125, true, -2.0);
  EXPECT_EQ(c.momentum, 0.9F);
  EXPECT_EQ(c.one_minus_dampening, 0.75F);
  EXPECT_EQ(c.l2, 0.125F);
  EXPECT_EQ(c.negative_lr, -0.5F);
  EXPECT_EQ(c.grad_scale, -2.0F);
  EXPECT_TRUE(c.first);
  EXPECT_FALSE(c.nesterov);
}

}  // namespace
}  // namespace lightning_zero
