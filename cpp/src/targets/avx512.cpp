#include "simd/avx512.h"
#include "kernels/add.h"
#include "kernels/blocks.h"
#include "kernels/split.h"
#include "kernels/sum_of_squares.h"
#include "kernels/update.h"
#include "lightning_zero/dispatch.h"

namespace lightning_zero {

const Kernels kAvx512Kernels = {
    adam<Avx512Float>,
    update<Avx512Float, AdagradRule<Avx512Float>>,
    update<Avx512Float, LionRule<Avx512Float>>,
    sgd<Avx512Float>,
    sum_of_squares<Avx512Squares>,
    add<Avx512Float>,
    sum<Avx512Float>,
    split<Avx512Float>,
    join<Avx512Float>,
    quantize<Avx512Float>,
    dequantize<Avx512Float>,
};

}  // namespace lightning_zero
