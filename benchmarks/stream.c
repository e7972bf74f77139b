// The memory traffic of an optimizer's step without its arithmetic: it reads and writes the same arrays in one
// pass, with one addition per element. benchmarks/stream.py compiles it when a benchmark starts.
//
// The addends are the gradient's bits under a mask. The mask is 0, which the compiler does not know, so that
// all arrays keep their values. Stores to an array that is only written bypass the caches, as in STREAM itself.

#include <stddef.h>
#include <stdint.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

enum { BLOCK = 32 };  // elements: a cache line of the 16-bit copy

typedef struct {
  void* param;
  void* second;  // the remainder of a split parameter, or the 16-bit copy
  void *exp_avg, *exp_avg_sq;
  const void* grad;
  uint32_t mask;
} Arrays;

static void write_line(uint16_t* to, const uint16_t* from) {
#if defined(__AVX512F__)
  _mm512_stream_si512((__m512i*)to, _mm512_loadu_si512(from));
#elif defined(__AVX2__)
  for (int i = 0; i < 2; ++i)
    _mm256_stream_si256((__m256i*)to + i, _mm256_loadu_si256((const __m256i*)from + i));
#elif defined(__SSE2__)
  for (int i = 0; i < 4; ++i) _mm_stream_si128((__m128i*)to + i, _mm_loadu_si128((const __m128i*)from + i));
#else
  __builtin_memcpy(to, from, BLOCK * sizeof *to);
#endif
}

#define NOTHING(second, i, p, x)
#define READ_AND_WRITE(second, i, p, x) second[i] += (uint16_t)(x);
#define ROUND(second, i, p, x) half[j] = (uint16_t)((p) >> 16);
#define WRITE_LINE(second, i) write_line((second) + (i), half);
#define NO_LINE(second, i)

#define KERNEL(NAME, PARAM, STATE, GRAD, EACH, LINE)            \
  static void NAME(const Arrays* a, size_t begin, size_t end) { \
    PARAM* restrict param = a->param;                           \
    uint16_t* restrict second = a->second;                      \
    STATE* restrict exp_avg = a->exp_avg;                       \
    STATE* restrict exp_avg_sq = a->exp_avg_sq;                 \
    const GRAD* restrict grad = a->grad;                        \
    const uint32_t mask = a->mask;                              \
    uint16_t half[BLOCK];                                       \
    (void)second, (void)half;                                   \
    for (size_t i = begin; i < end; i += BLOCK) {               \
      for (size_t j = 0; j < BLOCK; ++j) {                      \
        const uint32_t x = grad[i + j] & mask;                  \
        const PARAM p = (PARAM)(param[i + j] + x);              \
        param[i + j] = p;                                       \
        exp_avg[i + j] += (STATE)x;                             \
        exp_avg_sq[i + j] += (STATE)x;                          \
        EACH(second, i + j, p, x)                               \
      }                                                         \
      LINE(second, i)                                           \
    }                                                           \
  }

KERNEL(fp32, uint32_t, uint32_t, uint32_t, NOTHING, NO_LINE)
KERNEL(fp32_copy, uint32_t, uint32_t, uint16_t, ROUND, WRITE_LINE)
KERNEL(split, uint16_t, uint32_t, uint16_t, READ_AND_WRITE, NO_LINE)
KERNEL(fp32_copy_half, uint32_t, uint16_t, uint16_t, ROUND, WRITE_LINE)
KERNEL(split_half, uint16_t, uint16_t, uint16_t, READ_AND_WRITE, NO_LINE)
KERNEL(split_byte, uint16_t, uint8_t, uint16_t, READ_AND_WRITE, NO_LINE)

static void (*const KERNELS[])(const Arrays*, size_t, size_t) = {fp32,           fp32_copy,  split,
                                                                 fp32_copy_half, split_half, split_byte};

// Called by every thread: takes chunks of its own part of the arrays, then of the others' parts. `next` has
// as many counters as there are threads, 0 at first; `count` and `chunk` are multiples of 32.
void stream(int layout, const Arrays* arrays, size_t count, size_t chunk, size_t* next, size_t thread,
            size_t threads) {
  const size_t chunks = (count + chunk - 1) / chunk;
  for (size_t k = 0; k < threads; ++k) {
    const size_t part = (thread + k) % threads;
    const size_t first = chunks * part / threads;
    const size_t stop = chunks * (part + 1) / threads;
    for (size_t c; (c = first + __atomic_fetch_add(&next[part], 1, __ATOMIC_RELAXED)) < stop;)
      KERNELS[layout](arrays, c * chunk, (c + 1) * chunk < count ? (c + 1) * chunk : count);
  }
#if defined(__SSE2__)
  _mm_sfence();
#endif
}
