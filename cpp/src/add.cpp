#include "lightning_zero/add.h"

#include "pieces.h"

namespace lightning_zero {

void add_parallel(AddFunction add, const AddArrays& arrays, std::size_t threads) {
  for_pieces(arrays.count, threads, [&](std::size_t start, std::size_t count) {
    add({arrays.total + start, static_cast<const char*>(arrays.values) + start * item_size(arrays.dtype),
         arrays.dtype, count});
  });
}

void sum_parallel(SumFunction sum, const SumArrays& arrays, std::size_t threads) {
  for_pieces(arrays.count, threads, [&](std::size_t start, std::size_t count) {
    SumArrays piece = arrays;
    piece.start += start;
    piece.count = count;
    sum(piece);
  });
}

}  // namespace lightning_zero
