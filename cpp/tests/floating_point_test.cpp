// The floating-point environment of a kernel.
#include "lightning_zero/floating_point.h"

#include <gtest/gtest.h>

#include <cfenv>

#include "environments.h"

namespace lightning_zero {
namespace {

// Computed at run time, since the compiler does not know the operands.
float product(float a, float b) {
  volatile float x = a;
  volatile float y = b;
  volatile float result = x * y;
  return result;
}

constexpr float kSmallest = 0x1p-149F;

bool keeps_subnormals() {
  return product(0x1p-100F, 0x1p-49F) == kSmallest && product(kSmallest, 0x1p24F) > 0.0F;
}

TEST(DefaultFloatingPointTest, RoundsToNearestForItsLifetime) {
  const HostileFloatingPoint hostile;
  {
    const DefaultFloatingPoint environment;
    EXPECT_EQ(std::fegetround(), FE_TONEAREST);
    EXPECT_EQ(product(1.0F + 0x1p-23F, 1.0F + 0x1p-23F), 1.0F + 0x1p-22F);
  }
  EXPECT_EQ(std::fegetround(), FE_UPWARD);
  EXPECT_EQ(product(1.0F + 0x1p-23F, 1.0F + 0x1p-23F), 1.0F + 0x1.8p-22F);
}

TEST(DefaultFloatingPointTest, KeepsSubnormalsForItsLifetime) {
  const HostileFloatingPoint hostile;
  const bool before = keeps_subnormals();
  {
    const DefaultFloatingPoint environment;
    EXPECT_TRUE(keeps_subnormals());
  }
  EXPECT_EQ(keeps_subnormals(), before);
#ifdef LIGHTNING_ZERO_X86
  EXPECT_FALSE(before);
#endif
}

TEST(DefaultFloatingPointTest, RaisesNoFlagOfTheCaller) {
  std::feclearexcept(FE_ALL_EXCEPT);
  std::feraiseexcept(FE_INVALID);
  {
    const DefaultFloatingPoint environment;
    EXPECT_EQ(std::fetestexcept(FE_ALL_EXCEPT), 0);
    product(1e30F, 1e30F);
    EXPECT_NE(std::fetestexcept(FE_OVERFLOW), 0);
  }
  EXPECT_EQ(std::fetestexcept(FE_ALL_EXCEPT), FE_INVALID);
  std::feclearexcept(FE_ALL_EXCEPT);
}

TEST(DefaultFloatingPointTest, Nests) {
  const HostileFloatingPoint hostile;
  {
    const DefaultFloatingPoint outer;
    {
      const DefaultFloatingPoint inner;
    }
    EXPECT_EQ(std::fegetround(), FE_TONEAREST);
    EXPECT_TRUE(keeps_subnormals());
  }
  EXPECT_EQ(std::fegetround(), FE_UPWARD);
}

}  // namespace
}  // namespace lightning_zero
