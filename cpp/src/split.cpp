#include "lightning_zero/split.h"

#include "pieces.h"

namespace lightning_zero {

void split_parallel(SplitFunction convert, const SplitArrays& arrays, std::size_t threads) {
  for_pieces(arrays.count, threads, [&](std::size_t start, std::size_t count) {
    convert({arrays.whole + start, static_cast<char*>(arrays.high) + start * item_size(arrays.dtype),
             arrays.dtype, arrays.remainder + start, count});
  });
}

}  // namespace lightning_zero
