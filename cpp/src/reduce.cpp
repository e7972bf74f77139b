#include "lightning_zero/reduce.h"

#include <algorithm>
#include <vector>

#include "lightning_zero/floating_point.h"
#include "lightning_zero/thread_pool.h"

namespace lightning_zero {

double sum_of_squares_parallel(SumOfSquaresFunction sum, const void* values, DType dtype, std::size_t count,
                               std::size_t threads) {
  constexpr std::size_t kPiece = std::size_t{1} << 16;  // fixed: it decides the order of the additions
  const auto* bytes = static_cast<const char*>(values);
  std::vector<double> sums((count + kPiece - 1) / kPiece);
  parallel_for(sums.size(), threads, [&](std::size_t i) {
    const DefaultFloatingPoint environment;
    const std::size_t start = i * kPiece;
    sums[i] = sum(bytes + start * item_size(dtype), dtype, std::min(kPiece, count - start));
  });
  const DefaultFloatingPoint environment;
  double total = 0.0;
  for (const double partial : sums) total += partial;
  return total;
}

}  // namespace lightning_zero
