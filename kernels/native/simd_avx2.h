// Vectors of eight floats: AVX2, FMA and F16C. Included inside the level's own namespace.

struct Simd {
    static constexpr int W = 8;
    using F = __m256;
    using I = __m256i;
    static constexpr int panel(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }

    static F set1(float x) { return _mm256_set1_ps(x); }
    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
    static I mask(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }
    static F load_part(const float* p, int n) { return _mm256_maskload_ps(p, mask(n)); }
    static void store_part(float* p, F x, int n) { _mm256_maskstore_ps(p, mask(n), x); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F div(F a, F b) { return _mm256_div_ps(a, b); }
    static F max(F a, F b) { return _mm256_max_ps(a, b); }
    static F min(F a, F b) { return _mm256_min_ps(a, b); }
    static F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
    static F keep_from(F x, F from, F bound) { return _mm256_and_ps(x, _mm256_cmp_ps(from, bound, _CMP_GE_OQ)); }
    static F worst(F a, F b) {  // the larger magnitude by bits, so NaN stays
        return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(abs(a)), _mm256_castps_si256(abs(b))));
    }
    static bool all_within(F x, F bound) { return _mm256_movemask_ps(_mm256_cmp_ps(abs(x), bound, _CMP_LE_OQ)) == 0xFF; }
    static I to_int(F x) { return _mm256_cvtps_epi32(x); }
    static F to_float(I x) { return _mm256_cvtepi32_ps(x); }
    static F power_of_two(I n) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
    }
    static F rint(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static float hmax(F x) {
        __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        y = _mm_max_ps(y, _mm_movehl_ps(y, y));
        return _mm_cvtss_f32(_mm_max_ss(y, _mm_shuffle_ps(y, y, 1)));
    }
    static float hsum(F x) {
        __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        y = _mm_add_ps(y, _mm_movehl_ps(y, y));
        return _mm_cvtss_f32(_mm_add_ss(y, _mm_shuffle_ps(y, y, 1)));
    }

    static __m128i words(const std::uint16_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
    static __m128i words_part(const void* p, int n) {
        alignas(16) std::uint16_t h[W] = {};
        std::memcpy(h, p, sizeof(std::uint16_t) * n);
        return _mm_load_si128(reinterpret_cast<const __m128i*>(h));
    }
    static void put_part(void* p, __m128i x, int n) {
        alignas(16) std::uint16_t h[W];
        _mm_store_si128(reinterpret_cast<__m128i*>(h), x);
        std::memcpy(p, h, sizeof(std::uint16_t) * n);
    }
    static F bf16_bits(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
    static F load_half(const std::uint16_t* p) { return _mm256_cvtph_ps(words(p)); }
    static F load_half_part(const std::uint16_t* p, int n) { return _mm256_cvtph_ps(words_part(p, n)); }
    static F load_bf16(const std::uint16_t* p) { return bf16_bits(words(p)); }
    static F load_bf16_part(const std::uint16_t* p, int n) { return bf16_bits(words_part(p, n)); }
    static __m128i to_half(F x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static F round_half(F x) { return _mm256_cvtph_ps(to_half(x)); }
    static void store_half(std::uint16_t* p, F x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_half(x)); }
    static void store_half_part(std::uint16_t* p, F x, int n) { put_part(p, to_half(x), n); }
    static __m128i narrow(I x) {  // low 16 bits of each lane, which must fit unsigned
        return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    }
    static __m128i to_bf16(F x) {
        const I bits = _mm256_castps_si256(x);
        const I odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        return narrow(_mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16));
    }
    static void store_bf16(std::uint16_t* p, F x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bf16(x)); }
    static void store_bf16_part(std::uint16_t* p, F x, int n) { put_part(p, to_bf16(x), n); }

    static I load_pairs(const std::int8_t* p) {
        return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static I load_pairs_part(const std::int8_t* p, int n) { return _mm256_cvtepi8_epi16(words_part(p, n)); }
    static I dot_pairs(I sum, I a, I b) {
        const I products = _mm256_madd_epi16(a, b);
#if defined(__GNUC__) && !defined(__clang__)
        // GCC gives the sum a register of its own, and then copies and spills a panel's sums each step.
        asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(products));
        return sum;
#else
        return _mm256_add_epi32(sum, products);
#endif
    }
    static I set1_int(std::int32_t x) { return _mm256_set1_epi32(x); }
    static I pack_pairs(I low, I high) { return _mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), 0xAA); }
    static void store_int(std::int32_t* p, I x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
    static __m128i code_words(I low, I high) {
        const I byte = _mm256_set1_epi32(0xFF);
        return narrow(_mm256_or_si256(_mm256_and_si256(low, byte), _mm256_slli_epi32(_mm256_and_si256(high, byte), 8)));
    }
    static void store_pairs(std::int8_t* p, I low, I high) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), code_words(low, high));
    }
    static void store_pairs_part(std::int8_t* p, I low, I high, int n) { put_part(p, code_words(low, high), n); }
    static void split_pairs(I pairs, F& low, F& high) {
        low = to_float(_mm256_srai_epi32(_mm256_slli_epi32(pairs, 16), 16));
        high = to_float(_mm256_srai_epi32(pairs, 16));
    }
};

// 32 bytes on their way from one place to another.
struct Wide {
    static constexpr std::size_t N = 32;
    using V = __m256i;

    static V load(const std::uint8_t* p) {
        V value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        // Keeps the compiler from reading the source a second time: another process may write to it.
        __asm__ volatile("" : "+x"(value));
        return value;
    }
    static void store(std::uint8_t* p, V x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
    static void stream(std::uint8_t* p, V x) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), x); }
    static void fence() { _mm_sfence(); }
    static void add_halves(__m128i x, __m128i y, __m128i z, std::uint64_t& a, std::uint64_t& b, std::uint64_t& c) {
        a = _mm_crc32_u64(a, static_cast<std::uint64_t>(_mm_cvtsi128_si64(x)));
        b = _mm_crc32_u64(b, static_cast<std::uint64_t>(_mm_cvtsi128_si64(y)));
        c = _mm_crc32_u64(c, static_cast<std::uint64_t>(_mm_cvtsi128_si64(z)));
        a = _mm_crc32_u64(a, static_cast<std::uint64_t>(_mm_extract_epi64(x, 1)));
        b = _mm_crc32_u64(b, static_cast<std::uint64_t>(_mm_extract_epi64(y, 1)));
        c = _mm_crc32_u64(c, static_cast<std::uint64_t>(_mm_extract_epi64(z, 1)));
    }
    // Add a vector to each of three checksums, turn by turn: each sum waits three cycles for itself.
    static void add_to(V x, V y, V z, std::uint64_t& a, std::uint64_t& b, std::uint64_t& c) {
        add_halves(_mm256_castsi256_si128(x), _mm256_castsi256_si128(y), _mm256_castsi256_si128(z), a, b, c);
        add_halves(_mm256_extracti128_si256(x, 1), _mm256_extracti128_si256(y, 1), _mm256_extracti128_si256(z, 1), a, b, c);
    }
};
