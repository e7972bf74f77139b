#include "simd/avx2.h"
#include "kernels/add.h"
#include "kernels/blocks.h"
#include "kernels/split.h"
#include "kernels/sum_of_squares.h"
#include "kernels/update.h"
#include "lightning_zero/dispatch.h"

namespace lightning_zero {

const Kernels kAvx2Kernels = {
    adam<Avx2Float>,
    update<Avx2Float, AdagradRule<Avx2Float>>,
    update<Avx2Float, LionRule<Avx2Float>>,
    sgd<Avx2Float>,
    sum_of_squares<Avx2Squares>,
    add<Avx2Float>,
    sum<Avx2Float>,
    split<Avx2Float>,
    join<Avx2Float>,
    quantize<Avx2Float>,
    dequantize<Avx2Float>,
};

}  // namespace lightning_zero
