// Vectors of sixteen floats: AVX-512 F, BW, DQ, VL and VNNI. Included inside the level's own namespace.

struct Simd {
    static constexpr int W = 16;
    using F = __m512;
    using I = __m512i;
    static constexpr int panel(int rows) { return rows == 1 ? 8 : 4; }

    static __mmask16 mask(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
    static F set1(float x) { return _mm512_set1_ps(x); }
    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    static F load_part(const float* p, int n) { return _mm512_maskz_loadu_ps(mask(n), p); }
    static void store_part(float* p, F x, int n) { _mm512_mask_storeu_ps(p, mask(n), x); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F max(F a, F b) { return _mm512_max_ps(a, b); }
    static F min(F a, F b) { return _mm512_min_ps(a, b); }
    static F abs(F a) { return _mm512_abs_ps(a); }
    static F keep_from(F x, F from, F bound) {
        return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(from, bound, _CMP_GE_OQ), x);
    }
    static F worst(F a, F b) {  // the larger magnitude by bits, so NaN stays
        return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(abs(a)), _mm512_castps_si512(abs(b))));
    }
    static bool all_within(F x, F bound) { return _mm512_cmp_ps_mask(abs(x), bound, _CMP_LE_OQ) == 0xFFFF; }
    static I to_int(F x) { return _mm512_cvtps_epi32(x); }
    static F to_float(I x) { return _mm512_cvtepi32_ps(x); }
    static F power_of_two(I n) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
    }
    static F rint(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static float hmax(F x) { return _mm512_reduce_max_ps(x); }
    static float hsum(F x) { return _mm512_reduce_add_ps(x); }

    static __m256i words(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
    static __m256i words_part(const void* p, int n) { return _mm256_maskz_loadu_epi16(mask(n), p); }
    static F bf16_bits(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
    static F load_half(const std::uint16_t* p) { return _mm512_cvtph_ps(words(p)); }
    static F load_half_part(const std::uint16_t* p, int n) { return _mm512_cvtph_ps(words_part(p, n)); }
    static F load_bf16(const std::uint16_t* p) { return bf16_bits(words(p)); }
    static F load_bf16_part(const std::uint16_t* p, int n) { return bf16_bits(words_part(p, n)); }
    static __m256i to_half(F x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static F round_half(F x) { return _mm512_cvtph_ps(to_half(x)); }
    static void store_half(std::uint16_t* p, F x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_half(x)); }
    static void store_half_part(std::uint16_t* p, F x, int n) { _mm256_mask_storeu_epi16(p, mask(n), to_half(x)); }
    static __m256i to_bf16(F x) {
        const I bits = _mm512_castps_si512(x);
        const I odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const I sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
        return _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16));
    }
    static void store_bf16(std::uint16_t* p, F x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(x)); }
    static void store_bf16_part(std::uint16_t* p, F x, int n) { _mm256_mask_storeu_epi16(p, mask(n), to_bf16(x)); }

    static I load_pairs(const std::int8_t* p) { return _mm512_cvtepi8_epi16(words(p)); }
    static I load_pairs_part(const std::int8_t* p, int n) { return _mm512_cvtepi8_epi16(words_part(p, n)); }
    static I dot_pairs(I sum, I a, I b) {
#if defined(__GNUC__) && !defined(__clang__)
        // GCC gives the intrinsic's result a register of its own, and then copies and spills a panel's sums each step.
        asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
        return sum;
#else
        return _mm512_dpwssd_epi32(sum, a, b);
#endif
    }
    static I set1_int(std::int32_t x) { return _mm512_set1_epi32(x); }
    static I pack_pairs(I low, I high) {
        return _mm512_mask_blend_epi16(0xAAAAAAAAu, low, _mm512_slli_epi32(high, 16));
    }
    static void store_int(std::int32_t* p, I x) { _mm512_storeu_si512(p, x); }
    static __m256i code_words(I low, I high) {
        return _mm512_cvtepi32_epi16(_mm512_or_si512(_mm512_and_si512(low, _mm512_set1_epi32(0xFF)), _mm512_slli_epi32(high, 8)));
    }
    static void store_pairs(std::int8_t* p, I low, I high) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), code_words(low, high));
    }
    static void store_pairs_part(std::int8_t* p, I low, I high, int n) {
        _mm256_mask_storeu_epi16(p, mask(n), code_words(low, high));
    }
    static void split_pairs(I pairs, F& low, F& high) {
        low = to_float(_mm512_srai_epi32(_mm512_slli_epi32(pairs, 16), 16));
        high = to_float(_mm512_srai_epi32(pairs, 16));
    }
};

// 64 bytes on their way from one place to another: a cache line.
struct Wide {
    static constexpr std::size_t N = 64;
    using V = __m512i;

    static V load(const std::uint8_t* p) {
        V value = _mm512_loadu_si512(p);
        // Keeps the compiler from reading the source a second time: another process may write to it.
        __asm__ volatile("" : "+v"(value));
        return value;
    }
    static void store(std::uint8_t* p, V x) { _mm512_storeu_si512(p, x); }
    static void stream(std::uint8_t* p, V x) { _mm512_stream_si512(reinterpret_cast<__m512i*>(p), x); }
    static void fence() { _mm_sfence(); }
    template <int kPart>
    static void add_part(V x, V y, V z, std::uint64_t& a, std::uint64_t& b, std::uint64_t& c) {
        const __m128i p = _mm512_extracti32x4_epi32(x, kPart), q = _mm512_extracti32x4_epi32(y, kPart),
                      r = _mm512_extracti32x4_epi32(z, kPart);
        a = _mm_crc32_u64(a, static_cast<std::uint64_t>(_mm_cvtsi128_si64(p)));
        b = _mm_crc32_u64(b, static_cast<std::uint64_t>(_mm_cvtsi128_si64(q)));
        c = _mm_crc32_u64(c, static_cast<std::uint64_t>(_mm_cvtsi128_si64(r)));
        a = _mm_crc32_u64(a, static_cast<std::uint64_t>(_mm_extract_epi64(p, 1)));
        b = _mm_crc32_u64(b, static_cast<std::uint64_t>(_mm_extract_epi64(q, 1)));
        c = _mm_crc32_u64(c, static_cast<std::uint64_t>(_mm_extract_epi64(r, 1)));
    }
    // Add a vector to each of three checksums, turn by turn: each sum waits three cycles for itself.
    static void add_to(V x, V y, V z, std::uint64_t& a, std::uint64_t& b, std::uint64_t& c) {
        add_part<0>(x, y, z, a, b, c);
        add_part<1>(x, y, z, a, b, c);
        add_part<2>(x, y, z, a, b, c);
        add_part<3>(x, y, z, a, b, c);
    }
};
