// The kernels of level "avx512". setup.py compiles this file with the flags that it needs; without them it offers nothing.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "crc.h"
#include "task.h"

#define KV_PREFETCH_LOCALITY 3

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)

#include <immintrin.h>

namespace kv {
namespace level_avx512 {
namespace {

#include "simd_avx512.h"
#include "elements.inc.h"
#include "ahead.inc.h"
#include "exp.inc.h"
#include "attend.inc.h"
#include "codec.inc.h"
#include "digest.inc.h"
#include "copy.inc.h"

const Level kLevel = {"avx512", attend, quantise, dequantise, digest, score, kCopies, sizeof kCopies / sizeof kCopies[0]};

}  // namespace
}  // namespace level_avx512

const Level* avx512_level() { return &level_avx512::kLevel; }

}  // namespace kv

#else

namespace kv {
const Level* avx512_level() { return nullptr; }
}  // namespace kv

#endif
