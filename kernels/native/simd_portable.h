// Vectors of four floats in GCC and Clang vector extensions: SSE2, NEON or plain scalar code, as the target has. Included inside the level's own namespace.

struct Simd {
    static constexpr int W = 4;
    typedef float F __attribute__((vector_size(16)));
    typedef std::int32_t I __attribute__((vector_size(16)));
    typedef std::uint32_t U __attribute__((vector_size(16)));
    // Vectors of a panel for a tile of `rows` rows: accumulators must stay in registers.
    static constexpr int panel(int rows) { return rows == 1 ? 4 : 2; }

    static F set1(float x) { return F{x, x, x, x}; }
    static F load(const float* p) { F x; std::memcpy(&x, p, sizeof x); return x; }
    static void store(float* p, F x) { std::memcpy(p, &x, sizeof x); }
    static F load_part(const float* p, int n) { F x{}; std::memcpy(&x, p, sizeof(float) * n); return x; }
    static void store_part(float* p, F x, int n) { std::memcpy(p, &x, sizeof(float) * n); }
    static F fma(F a, F b, F c) { return a * b + c; }
    static F add(F a, F b) { return a + b; }
    static F sub(F a, F b) { return a - b; }
    static F mul(F a, F b) { return a * b; }
    static F div(F a, F b) { return a / b; }
    static F max(F a, F b) { return a > b ? a : b; }  // b where either is NaN
    static F min(F a, F b) { return a < b ? a : b; }
    static F abs(F a) { return (F)((I)a & 0x7FFFFFFF); }
    // x where x >= bound, else 0
    static F keep_from(F x, F from, F bound) { return (F)((I)x & (I)(from >= bound)); }
    static F worst(F a, F b) {  // lane of the larger magnitude by bits, so NaN stays
        const I x = (I)abs(a), y = (I)abs(b);
        return (F)(x > y ? x : y);
    }
    static bool all_within(F x, F bound) {
        const I ok = abs(x) <= bound;
        return (ok[0] & ok[1] & ok[2] & ok[3]) != 0;
    }
    static F rint(F x) {  // to nearest even for |x| < 2^22; larger values and NaN come back as they are
        const F magic = (F)(((U)x & 0x80000000u) | (U)set1(8388608.0f));
        return abs(x) < set1(4194304.0f) ? (x + magic) - magic : x;
    }
    static I to_int(F x) { return __builtin_convertvector(rint(x), I); }
    static F to_float(I x) { return __builtin_convertvector(x, F); }
    static F power_of_two(I n) { return (F)((n + 127) << 23); }
    static float hmax(F x) { const float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3]; return a > b ? a : b; }
    static float hsum(F x) { return (x[0] + x[1]) + (x[2] + x[3]); }

    static U widen(const std::uint16_t* p, int n) {
        std::uint16_t h[W] = {};
        std::memcpy(h, p, sizeof(std::uint16_t) * n);
        return U{h[0], h[1], h[2], h[3]};
    }
    static F half_bits(U h) {
        const U magnitude = (h & 0x7FFFu) << 13;
        const F scaled = (F)magnitude * set1(5.192296858534828e33f);  // 2^112 moves the exponent's bias
        const U special = (U)(magnitude >= (0x7C00u << 13));
        const U bits = ((U)scaled & ~special) | ((magnitude | 0x7F800000u) & special);
        return (F)(bits | ((h & 0x8000u) << 16));
    }
    static F load_half(const std::uint16_t* p) { return half_bits(widen(p, W)); }
    static F load_half_part(const std::uint16_t* p, int n) { return half_bits(widen(p, n)); }
    static F load_bf16(const std::uint16_t* p) { return (F)(widen(p, W) << 16); }
    static F load_bf16_part(const std::uint16_t* p, int n) { return (F)(widen(p, n) << 16); }
    static std::uint16_t half_of(float value) {
        std::uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        const std::uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
        if (magnitude >= 0x47800000u) return static_cast<std::uint16_t>(sign | (magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u));
        if (magnitude < 0x38800000u) {  // subnormal or zero in fp16: adding 0.5 lets the FPU round at bit 2^-24
            float x;
            std::memcpy(&x, &magnitude, sizeof x);
            x += 0.5f;
            std::memcpy(&bits, &x, sizeof bits);
            return static_cast<std::uint16_t>(sign | (bits - 0x3F000000u));
        }
        const std::uint32_t rounded = magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u);
        return static_cast<std::uint16_t>(sign | (rounded >> 13));
    }
    static void store_half_part(std::uint16_t* p, F x, int n) {
        for (int i = 0; i < n; ++i) p[i] = half_of(x[i]);
    }
    static void store_half(std::uint16_t* p, F x) { store_half_part(p, x, W); }
    static F round_half(F x) {
        std::uint16_t h[W];
        store_half(h, x);
        return load_half(h);
    }
    static void store_bf16_part(std::uint16_t* p, F x, int n) {
        const U bits = (U)x, rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
        for (int i = 0; i < n; ++i) p[i] = static_cast<std::uint16_t>(rounded[i]);
    }
    static void store_bf16(std::uint16_t* p, F x) { store_bf16_part(p, x, W); }

    // Two int16 a lane, low and high half of the 32 bits, as vpmaddwd takes them.
    static I load_pairs_part(const std::int8_t* p, int n) {
        I x{};
        for (int i = 0; i < n; ++i)
            x[i] = static_cast<std::int32_t>(static_cast<std::uint16_t>(p[2 * i]) |
                                             static_cast<std::uint32_t>(static_cast<std::uint16_t>(p[2 * i + 1])) << 16);
        return x;
    }
    static I load_pairs(const std::int8_t* p) { return load_pairs_part(p, W); }
    static I low16(I x) { return (I)((U)x << 16) >> 16; }
    static I high16(I x) { return x >> 16; }
    static I dot_pairs(I sum, I a, I b) { return sum + low16(a) * low16(b) + high16(a) * high16(b); }
    static I set1_int(std::int32_t x) { return I{x, x, x, x}; }
    static I pack_pairs(I low, I high) { return (I)(((U)low & 0xFFFFu) | ((U)high << 16)); }
    static void store_int(std::int32_t* p, I x) { std::memcpy(p, &x, sizeof x); }
    // Codes of two lanes' values side by side: byte 2i is low[i], byte 2i+1 is high[i].
    static void store_pairs_part(std::int8_t* p, I low, I high, int n) {
        for (int i = 0; i < n; ++i) {
            p[2 * i] = static_cast<std::int8_t>(low[i]);
            p[2 * i + 1] = static_cast<std::int8_t>(high[i]);
        }
    }
    static void store_pairs(std::int8_t* p, I low, I high) { store_pairs_part(p, low, high, W); }
    static void split_pairs(I pairs, F& low, F& high) { low = to_float(low16(pairs)); high = to_float(high16(pairs)); }
};
