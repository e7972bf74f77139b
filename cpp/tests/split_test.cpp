// Conversions between whole and split masters.
#include "lightning_zero/split.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>

#include "buffer.h"
#include "numbers.h"

namespace lightning_zero {
namespace {

struct Both {
  Both(DType dtype, std::size_t count, std::size_t offset = 0)
      : dtype(dtype), whole(4, count, offset), high(2, count, 2 * offset), remainder(2, count, 3 * offset) {}
  SplitArrays view() {
    return {whole.as<float>(), high.data(), dtype, remainder.as<std::int16_t>(), whole.count()};
  }

  const DType dtype;
  Buffer whole, high, remainder;
};

bool same_bytes(const Buffer& a, const Buffer& b) { return std::memcmp(a.data(), b.data(), a.bytes()) == 0; }

class SplitTest : public ::testing::TestWithParam<const Target*> {
 protected:
  void split(Both& both) const { GetParam()->kernels.split(both.view()); }
  void join(Both& both) const { GetParam()->kernels.join(both.view()); }
};
INSTANTIATE_TEST_SUITE_P(Targets, SplitTest, ::testing::ValuesIn(supported_targets()), target_name);

constexpr DType kHalves[] = {DType::bfloat16, DType::float16};
constexpr std::size_t kMany = 100003;

TEST_P(SplitTest, HasTheBitsOfTheScalarTarget) {
  for (const DType dtype : kHalves) {
    for (std::size_t count = 0; count <= 70; ++count) {
      Both expected(dtype, count, count * 5 % 17);
      Both actual(dtype, count, count * 5 % 17);
      for (Both* both : {&expected, &actual}) fill_with_samples(both->whole, DType::float32, count);
      kScalarKernels.split(expected.view());
      split(actual);
      ASSERT_TRUE(same_numbers(dtype, expected.high, actual.high)) << name_of(dtype) << ' ' << count;
      ASSERT_TRUE(same_bytes(expected.remainder, actual.remainder)) << name_of(dtype) << ' ' << count;
      kScalarKernels.join(expected.view());
      join(actual);
      ASSERT_TRUE(same_numbers(DType::float32, expected.whole, actual.whole))
          << name_of(dtype) << ' ' << count;
    }
  }
}

TEST_P(SplitTest, HighIsTheNearestNumber) {
  for (const DType dtype : kHalves) {
    Both both(dtype, kMany);
    fill_with_samples(both.whole, DType::float32, 1);
    split(both);
    for (std::size_t i = 0; i < kMany; ++i) {
      const float x = float_of(both.whole.bits(i));
      const Ties ties = dtype == DType::bfloat16 ? Ties::away : Ties::even;
      ASSERT_TRUE(same_value(decode(dtype, both.high.bits(i)), nearest(dtype, x, ties)))
          << name_of(dtype) << ' ' << x;
    }
  }
}

TEST_P(SplitTest, BFloat16KeepsEveryNumber) {
  // A stride that is coprime to 2^32 visits all exponents, signs and low halves.
  Both both(DType::bfloat16, std::size_t{1} << 18);
  const auto value = [](std::size_t i) { return static_cast<std::uint32_t>(i) * 0x9E3779B1U; };
  for (std::size_t i = 0; i < both.whole.count(); ++i) both.whole.set_bits(i, value(i));
  split(both);
  join(both);
  for (std::size_t i = 0; i < both.whole.count(); ++i) {
    // For the largest numbers the nearest bf16 number is infinite, but the distance still restores them.
    ASSERT_TRUE(same_bits(DType::float32, both.whole.bits(i), value(i))) << std::hex << value(i);
    if (std::isnan(float_of(value(i)))) {
      ASSERT_EQ(both.high.bits(i), 0x7FC0U);
      ASSERT_EQ(both.remainder.bits(i), 0U);
    }
  }
}

TEST_P(SplitTest, BFloat16KeepsSpecialNumbers) {
  const std::uint32_t special[] = {0,          0x80000000, 1,          0x807FFFFF, 0x00008000, 0x3F808000,
                                   0x3F818000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7F7F8000};
  Both both(DType::bfloat16, std::size(special), 1);
  for (std::size_t i = 0; i < std::size(special); ++i) both.whole.set_bits(i, special[i]);
  split(both);
  join(both);
  for (std::size_t i = 0; i < std::size(special); ++i) EXPECT_EQ(both.whole.bits(i), special[i]) << i;
}

TEST_P(SplitTest, Float16KeepsItsRange) {
  Both both(DType::float16, kMany);
  const auto value = [](std::size_t i) {
    // Any sign and fraction, exponents from that of 2^-20 to that of 2^17.
    const std::uint32_t any = static_cast<std::uint32_t>(i) * 0x9E3779B1U;
    return float_of((any & 0x807FFFFFU) | (static_cast<std::uint32_t>(107 + i % 38) << 23));
  };
  for (std::size_t i = 0; i < kMany; ++i) both.whole.set_bits(i, bits_of(value(i)));
  split(both);
  join(both);
  for (std::size_t i = 0; i < kMany; ++i) {
    const double before = value(i);
    const double after = float_of(both.whole.bits(i));
    if (std::abs(before) >= 65520) {
      ASSERT_TRUE(std::isinf(after)) << before;
      ASSERT_EQ(both.remainder.bits(i), 0U) << before;
    } else if (std::abs(before) >= 0x1p-16) {
      ASSERT_EQ(after, before);
    } else {
      ASSERT_LE(std::abs(after - before), 0x1p-40) << before;
    }
    ASSERT_EQ(std::signbit(after), std::signbit(before));
  }
}

TEST_P(SplitTest, WithoutDistanceEveryHalfIsItself) {
  for (const DType dtype : kHalves) {
    Both both(dtype, std::size_t{1} << 16);
    for (std::uint32_t i = 0; i < both.high.count(); ++i) both.high.set_bits(i, i);
    join(both);
    for (std::uint32_t i = 0; i < both.high.count(); ++i) {
      ASSERT_TRUE(same_value(float_of(both.whole.bits(i)), decode(dtype, i))) << name_of(dtype) << ' ' << i;
    }
    split(both);
    for (std::uint32_t i = 0; i < both.high.count(); ++i) {
      ASSERT_TRUE(same_bits(dtype, both.high.bits(i), i)) << name_of(dtype) << ' ' << i;
      ASSERT_EQ(both.remainder.bits(i), 0U) << name_of(dtype) << ' ' << i;
    }
  }
}

}  // namespace
}  // namespace lightning_zero
