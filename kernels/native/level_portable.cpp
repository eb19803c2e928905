// The kernels of level "portable".
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "task.h"

#define KV_PREFETCH_LOCALITY 3

namespace kv {
namespace level_portable {
namespace {

#include "simd_portable.h"
#include "elements.inc.h"
#include "ahead.inc.h"
#include "exp.inc.h"
#include "attend.inc.h"
#include "codec.inc.h"
#include "digest.inc.h"

const Level kLevel = {"portable", attend, quantise, dequantise, digest, score, nullptr, 0};

}  // namespace
}  // namespace level_portable

const Level* portable_level() { return &level_portable::kLevel; }

}  // namespace kv
