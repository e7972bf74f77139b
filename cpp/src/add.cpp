#include "lightning_zero/add.h"

#include <algorithm>

#include "lightning_zero/floating_point.h"
#include "lightning_zero/thread_pool.h"

namespace lightning_zero {

void add_parallel(AddFunction add, const AddArrays& arrays, std::size_t threads) {
  constexpr std::size_t kPiece = std::size_t{1} << 18;
  parallel_for((arrays.count + kPiece - 1) / kPiece, threads, [&](std::size_t i) {
    const DefaultFloatingPoint environment;
    const std::size_t start = i * kPiece;
    add({arrays.total + start, static_cast<const char*>(arrays.values) + start * item_size(arrays.dtype),
         arrays.dtype, std::min(kPiece, arrays.count - start)});
  });
}

}  // namespace lightning_zero
