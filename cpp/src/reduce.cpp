#include "lightning_zero/reduce.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "lightning_zero/floating_point.h"
#include "lightning_zero/thread_pool.h"

namespace lightning_zero {

double sum_of_squares_parallel(SumOfSquaresFunction sum, const void* values, DType dtype, std::size_t count,
                               std::size_t threads) {
  constexpr std::size_t kPiece =
      kRows * kRows * kRows * kLanes;  // fixed, since it determines the order of the additions
  const auto* bytes = static_cast<const char*>(values);
  std::vector<double> sums((count + kPiece - 1) / kPiece);
  parallel_for(sums.size(), threads, [&](std::size_t i) {
    const DefaultFloatingPoint environment;
    const std::size_t start = i * kPiece;
    sums[i] = sum(bytes + start * item_size(dtype), dtype, std::min(kPiece, count - start));
  });
  const DefaultFloatingPoint environment;
  while (sums.size() > 1) {
    std::vector<double> next((sums.size() + kRows - 1) / kRows);
    for (std::size_t i = 0; i < sums.size(); ++i) next[i / kRows] += sums[i];
    sums = std::move(next);
  }
  return sums.empty() ? 0.0 : sums.front();
}

}  // namespace lightning_zero
