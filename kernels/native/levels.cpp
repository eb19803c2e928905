#include "levels.h"

namespace kv {

const Level* supported_level(const std::string& name) {
#if defined(__x86_64__)
    if (name == "avx512") {
        const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                         __builtin_cpu_supports("avx512vnni");
        return has ? avx512_level() : nullptr;
    }
    if (name == "avx2") {
        const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
        return has ? avx2_level() : nullptr;
    }
#endif
    return name == "portable" ? portable_level() : nullptr;
}

const Level& best_level() {
    static const Level& best = [] () -> const Level& {
        for (const char* name : kLevelNames)
            if (const Level* level = supported_level(name)) return *level;
        return *portable_level();
    }();
    return best;
}

}  // namespace kv
