// The sums of squares of one piece.
#include "lightning_zero/reduce.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "buffer.h"
#include "numbers.h"

namespace lightning_zero {
namespace {

class SumOfSquaresTest : public ::testing::TestWithParam<const Target*> {
 protected:
  double sum(const Buffer& values, DType dtype) const {
    return GetParam()->kernels.sum_of_squares(values.data(), dtype, values.count());
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, SumOfSquaresTest, ::testing::ValuesIn(supported_targets()), target_name);

constexpr DType kAll[] = {DType::float32, DType::bfloat16, DType::float16};

// The documented order of the additions.
double reference(const Buffer& values, DType dtype) {
  constexpr std::size_t small = kRows * kLanes, large = kRows * small;
  double lanes[kLanes] = {};
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    for (std::size_t i = 0; i < values.count(); i += large) {
      double of_large = 0.0;
      for (std::size_t k = i; k < std::min(values.count(), i + large); k += small) {
        double of_small = 0.0;
        for (std::size_t j = k + lane; j < std::min(values.count(), k + small); j += kLanes) {
          const double x = decode(dtype, values.bits(j));
          of_small += x * x;
        }
        of_large += of_small;
      }
      lanes[lane] += of_large;
    }
  }
  double sum = 0.0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

TEST_P(SumOfSquaresTest, AddsInTheDocumentedOrder) {
  for (const DType dtype : kAll) {
    for (std::size_t number = 0; number <= 80; ++number) {
      const std::size_t count = number <= 70 ? number : number * number;  // beyond 70 several groups of rows
      Buffer values(item_size(dtype), count, count * 5 % 17);
      fill_with_samples(values, dtype, count);
      ASSERT_TRUE(same_value(sum(values, dtype), reference(values, dtype))) << name_of(dtype) << ' ' << count;
      // Moderate values, since nearly all of the sums above are not finite.
      const std::uint32_t moderate = dtype == DType::float32 ? 0xBFFFFFFF : 0xBFFF;
      fill_with_samples(values, dtype, count, moderate);
      ASSERT_EQ(sum(values, dtype), reference(values, dtype)) << name_of(dtype) << ' ' << count;
      ASSERT_TRUE(std::isfinite(sum(values, dtype)));
    }
  }
}

TEST_P(SumOfSquaresTest, IsFiniteIfAndOnlyIfEveryElementIs) {
  constexpr std::size_t count = 37;
  for (const DType dtype : kAll) {
    const std::uint32_t infinity = dtype == DType::float32    ? 0x7F800000U
                                   : dtype == DType::bfloat16 ? 0x7F80U
                                                              : 0x7C00U;
    Buffer values(item_size(dtype), count);
    for (std::size_t i = 0; i < count; ++i) values.set_bits(i, infinity - 1);
    const double largest = decode(dtype, infinity - 1);
    EXPECT_NEAR(sum(values, dtype) / (count * largest * largest), 1.0, 1e-12);
    for (std::size_t i = 0; i < count; ++i) {
      values.set_bits(i, infinity);
      EXPECT_EQ(sum(values, dtype), std::numeric_limits<double>::infinity()) << i;
      values.set_bits(i, infinity + 1);
      EXPECT_TRUE(std::isnan(sum(values, dtype))) << i;
      values.set_bits(i, infinity - 1);
    }
  }
}

TEST_P(SumOfSquaresTest, CountsTheSmallestNumbers) {
  for (const DType dtype : kAll) {
    Buffer values(item_size(dtype), 33);
    for (std::size_t i = 0; i < values.count(); ++i) values.set_bits(i, 1);
    const double smallest = decode(dtype, 1);
    EXPECT_EQ(sum(values, dtype), 33 * smallest * smallest);
    EXPECT_GT(sum(values, dtype), 0.0);
  }
}

}  // namespace
}  // namespace lightning_zero
