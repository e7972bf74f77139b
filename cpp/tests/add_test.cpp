// Sums of arrays.
#include "lightning_zero/add.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

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

TEST_P(AddTest, SumsProductsInOrderAndRoundsTo16BitsOnce) {
  for (const DType dtype : kAll) {
    for (std::size_t count = 0; count <= 70; ++count) {
      for (std::size_t number = 1; number <= 3; ++number) {
        const std::size_t item = item_size(dtype);
        const float factor = count % 2 == 0 ? 1.0F : 0.3F;
        Buffer first(item, count, count % 17), second(item, count, 5), third(item, count);
        std::vector<double> expected;
        Buffer* const buffers[] = {&first, &second, &third};
        for (std::size_t p = 0; p < number; ++p) fill_with_samples(*buffers[p], dtype, 3 * count + p);
        for (std::size_t i = 0; i < count; ++i) {
          const auto product = [&](std::size_t p) {
            const float exact = static_cast<float>(decode(dtype, buffers[p]->bits(i))) * factor;
            return static_cast<float>(nearest(dtype, exact));
          };
          float sum = product(0);
          for (std::size_t p = 1; p < number; ++p) sum += product(p);
          expected.push_back(nearest(dtype, sum));
        }
        const void* const parts[] = {first.data(), second.data(), third.data()};
        Buffer written(4, count, 3), added(4, count, 7), before(4, count);
        fill_with_samples(added, DType::float32, count + 5);
        for (std::size_t i = 0; i < count; ++i) before.set_bits(i, added.bits(i));
        const auto sum_to = [&](Buffer& total, DType total_dtype, bool add) {
          GetParam()->kernels.sum({total.data(), total_dtype, add, parts, number, factor, dtype, 0, count});
        };
        sum_to(written, DType::float32, false);
        sum_to(added, DType::float32, true);
        Buffer& total = *buffers[number - 1];  // in the place of the last part
        sum_to(total, dtype, false);
        for (std::size_t i = 0; i < count; ++i) {
          const float sum = static_cast<float>(expected[i]);
          ASSERT_TRUE(same_value(sum, decode(dtype, total.bits(i)))) << name_of(dtype) << ' ' << i;
          ASSERT_TRUE(same_value(sum, float_of(written.bits(i)))) << name_of(dtype) << ' ' << i;
          ASSERT_TRUE(same_value(float_of(before.bits(i)) + sum, float_of(added.bits(i))))
              << name_of(dtype) << ' ' << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace lightning_zero
