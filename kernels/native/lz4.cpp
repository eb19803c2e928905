#include "lz4.h"

#include <cstring>

namespace kv {
namespace {

// A length of 15 in the token goes on in further bytes, of which the first below 255 is the last.
bool longer(const std::uint8_t*& in, const std::uint8_t* end, std::size_t& length) {
    if (length != 15) return true;
    std::uint8_t more = 255;
    while (more == 255) {
        if (in == end) return false;
        more = *in++;
        length += more;
    }
    return true;
}

// What is copied may have been written by the same copy: a distance below the length repeats itself.
void repeat(std::uint8_t* to, std::size_t distance, std::size_t length) {
    if (distance == 1) {
        std::memset(to, to[-1], length);
        return;
    }
    while (length > distance) {
        std::memcpy(to, to - distance, distance);
        to += distance;
        length -= distance;
        distance *= 2;
    }
    std::memcpy(to, to - distance, length);
}

}  // namespace

bool lz4_decode(const std::uint8_t* in, std::size_t in_size, std::uint8_t* out, std::size_t size) {
    const std::uint8_t* const in_end = in + in_size;
    std::uint8_t* const begin = out;
    std::uint8_t* const out_end = out + size;
    while (in < in_end) {
        const unsigned token = *in++;
        std::size_t literals = token >> 4, length = token & 15;
        if (!longer(in, in_end, literals)) return false;
        if (literals > static_cast<std::size_t>(in_end - in) || literals > static_cast<std::size_t>(out_end - out)) return false;
        std::memcpy(out, in, literals);
        out += literals;
        in += literals;
        // The last sequence has literals only.
        if (in == in_end) return out == out_end;
        if (in_end - in < 2) return false;
        const std::size_t distance = in[0] | in[1] << 8;
        in += 2;
        if (distance == 0 || distance > static_cast<std::size_t>(out - begin)) return false;
        if (!longer(in, in_end, length)) return false;
        length += 4;
        if (length > static_cast<std::size_t>(out_end - out)) return false;
        repeat(out, distance, length);
        out += length;
    }
    return false;
}

void join_planes(const std::uint8_t* split, std::uint8_t* out, std::size_t size, int planes) {
    const std::size_t count = size / planes;
    if (planes == 1) {
        std::memcpy(out, split, size);
    } else if (planes == 2) {
        for (std::size_t i = 0; i < count; ++i) {
            out[2 * i] = split[i];
            out[2 * i + 1] = split[count + i];
        }
    } else {
        for (std::size_t i = 0; i < count; ++i)
            for (int plane = 0; plane < planes; ++plane) out[planes * i + plane] = split[plane * count + i];
    }
}

}  // namespace kv
