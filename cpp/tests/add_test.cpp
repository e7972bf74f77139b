// Sums of an fp32 array and another one.
#include "lightning_zero/add.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "buffer.h"
#include "numbers.h"

namespace lightning_zero {
namespace {

class AddTest : public ::testing::TestWithParam<const Target*> {};
INSTANTIATE_TEST_SUITE_P(Targets, AddTest, ::testing::ValuesIn(supported_targets()), target_name);

constexpr DType kAll[] = {DType::float32, DType::bfloat16, DType::float16};

TEST_P(AddTest, RoundsTheExactSumOnce) {
  for (const DType dtype : kAll) {
    for (std::size_t count = 0; count <= 70; ++count) {
      Buffer total(4, count, count * 5 % 17), values(item_size(dtype), count, count * 3 % 17),
          expected(4, count);
      fill_with_samples(total, DType::float32, count);
      fill_with_samples(values, dtype, 2 * count + 1);
      for (std::size_t i = 0; i < count; ++i) {
        const float sum = float_of(total.bits(i)) + static_cast<float>(decode(dtype, values.bits(i)));
        expected.set_bits(i, bits_of(sum));
      }
      GetParam()->kernels.add({total.as<float>(), values.data(), dtype, count});
      ASSERT_TRUE(same_numbers(DType::float32, expected, total)) << name_of(dtype) << ' ' << count;
    }
  }
}

}  // namespace
}  // namespace lightning_zero
