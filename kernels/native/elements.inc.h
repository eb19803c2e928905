// Loads and stores by format over the level's `Simd`. Included inside a level's own namespace, after its Simd.

template <Format format>
inline Simd::F load_vector(const std::uint8_t* base, std::ptrdiff_t index) {
    if constexpr (format == Format::fp16) return Simd::load_half(reinterpret_cast<const std::uint16_t*>(base) + index);
    else if constexpr (format == Format::bf16) return Simd::load_bf16(reinterpret_cast<const std::uint16_t*>(base) + index);
    else return Simd::load(reinterpret_cast<const float*>(base) + index);
}

// The first `count` lanes, 1 <= count < W; the others are zero and their memory is not touched.
template <Format format>
inline Simd::F load_vector_part(const std::uint8_t* base, std::ptrdiff_t index, int count) {
    if constexpr (format == Format::fp16)
        return Simd::load_half_part(reinterpret_cast<const std::uint16_t*>(base) + index, count);
    else if constexpr (format == Format::bf16)
        return Simd::load_bf16_part(reinterpret_cast<const std::uint16_t*>(base) + index, count);
    else return Simd::load_part(reinterpret_cast<const float*>(base) + index, count);
}

template <Format format>
inline void store_vector(std::uint8_t* base, std::ptrdiff_t index, Simd::F x, int count) {
    const bool whole = count >= Simd::W;
    if constexpr (format == Format::fp32) {
        float* at = reinterpret_cast<float*>(base) + index;
        whole ? Simd::store(at, x) : Simd::store_part(at, x, count);
    } else {
        std::uint16_t* at = reinterpret_cast<std::uint16_t*>(base) + index;
        if constexpr (format == Format::fp16) whole ? Simd::store_half(at, x) : Simd::store_half_part(at, x, count);
        else whole ? Simd::store_bf16(at, x) : Simd::store_bf16_part(at, x, count);
    }
}

template <Format format>
inline Simd::F load_up_to(const std::uint8_t* base, std::ptrdiff_t index, int count) {
    return count >= Simd::W ? load_vector<format>(base, index) : load_vector_part<format>(base, index, count);
}

inline Simd::I load_pairs_up_to(const std::int8_t* at, int count) {
    return count >= Simd::W ? Simd::load_pairs(at) : Simd::load_pairs_part(at, count);
}

// Decode `count` fp16 numbers into floats; lanes up to the next vector become zero, so `to` is padded.
inline void widen_half(const std::uint8_t* from, float* to, int count) {
    for (int i = 0; i < count; i += Simd::W) Simd::store(to + i, load_up_to<Format::fp16>(from, i, count - i));
}

inline int smaller(int a, int b) { return a < b ? a : b; }
inline int larger(int a, int b) { return a > b ? a : b; }
