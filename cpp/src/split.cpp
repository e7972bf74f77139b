#include "lightning_zero/split.h"

#include <algorithm>

#include "lightning_zero/floating_point.h"
#include "lightning_zero/thread_pool.h"

namespace lightning_zero {

void split_parallel(SplitFunction convert, const SplitArrays& arrays, std::size_t threads) {
  constexpr std::size_t kPiece = std::size_t{1} << 18;
  parallel_for((arrays.count + kPiece - 1) / kPiece, threads, [&](std::size_t i) {
    const DefaultFloatingPoint environment;
    const std::size_t start = i * kPiece;
    convert({arrays.whole + start, static_cast<char*>(arrays.high) + start * item_size(arrays.dtype),
             arrays.dtype, arrays.remainder + start, std::min(kPiece, arrays.count - start)});
  });
}

}  // namespace lightning_zero
