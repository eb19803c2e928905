// exp and tanh over the level's `Simd`. Included inside a level's own namespace, before attend.inc.h.

inline Simd::F exp_vector(Simd::F x) {
    // Cephes' scheme: 2^n * polynomial of the rest; relative error 2e-7. Below -87 the answer is 0.
    const Simd::F bounded = Simd::min(Simd::max(x, Simd::set1(-87.3f)), Simd::set1(88.0f));
    const Simd::F turns = Simd::rint(Simd::mul(bounded, Simd::set1(1.44269504f)));
    Simd::F r = Simd::fma(turns, Simd::set1(-0.693359375f), bounded);
    r = Simd::fma(turns, Simd::set1(2.12194440e-4f), r);
    Simd::F y = Simd::set1(1.9875691500e-4f);
    y = Simd::fma(y, r, Simd::set1(1.3981999507e-3f));
    y = Simd::fma(y, r, Simd::set1(8.3334519073e-3f));
    y = Simd::fma(y, r, Simd::set1(4.1665795894e-2f));
    y = Simd::fma(y, r, Simd::set1(1.6666665459e-1f));
    y = Simd::fma(y, r, Simd::set1(5.0000001201e-1f));
    y = Simd::fma(y, Simd::mul(r, r), Simd::add(r, Simd::set1(1.0f)));
    return Simd::keep_from(Simd::mul(y, Simd::power_of_two(Simd::to_int(turns))), x, Simd::set1(-87.3f));
}

inline float exp_one(float x) {
    float lanes[Simd::W];
    Simd::store(lanes, exp_vector(Simd::set1(x)));
    return lanes[0];
}

inline Simd::F tanh_vector(Simd::F x) {
    const Simd::F grown = exp_vector(Simd::min(Simd::add(x, x), Simd::set1(40.0f)));
    return Simd::sub(Simd::set1(1.0f), Simd::div(Simd::set1(2.0f), Simd::add(grown, Simd::set1(1.0f))));
}
