// The kernels of level "avx2". setup.py compiles this file with the flags that it needs; without them it offers nothing.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "crc.h"
#include "task.h"

#define KV_PREFETCH_LOCALITY 3

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>

namespace kv {
namespace level_avx2 {
namespace {

#include "simd_avx2.h"
#include "elements.inc.h"
#include "ahead.inc.h"
#include "exp.inc.h"
#include "attend.inc.h"
#include "codec.inc.h"
#include "digest.inc.h"
#include "copy.inc.h"

const Level kLevel = {"avx2", attend, quantise, dequantise, digest, score, kCopies, sizeof kCopies / sizeof kCopies[0]};

}  // namespace
}  // namespace level_avx2

const Level* avx2_level() { return &level_avx2::kLevel; }

}  // namespace kv

#else

namespace kv {
const Level* avx2_level() { return nullptr; }
}  // namespace kv

#endif
