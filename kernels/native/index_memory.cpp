#include "index_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <new>
#include <random>

namespace kv {

namespace {

constexpr std::size_t kPage = 4096;

std::size_t whole_pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

std::uint64_t folded(std::uint64_t a, std::uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

}  // namespace

std::uint32_t tag_of(const std::uint64_t* seeds, std::uint32_t space, const std::uint8_t* key) {
    std::uint64_t words[kKeyWords];
    std::memcpy(words, key, sizeof words);
    const std::uint64_t low = folded(words[0] ^ seeds[0], words[1] ^ seeds[1]);
    const std::uint64_t high = folded(words[2] ^ seeds[2], words[3] ^ seeds[3]);
    const std::uint64_t mixed = folded(low ^ seeds[4], high ^ (space + seeds[2]));
    return static_cast<std::uint32_t>(mixed ^ mixed >> 32);
}

IndexShape::IndexShape(std::size_t slot_count, std::size_t name_count) : slots(slot_count), names(name_count) {
    // Tables are three quarters full at most, and their entries a power of two.
    entries_max = 1 << 10;
    while (entries_max * 3 < (slots + 1) * 4) entries_max *= 2;
    name = kPage;
    table = name + whole_pages(names * kKeyBytes);
    spaces = table + 2 * entries_max * sizeof(std::uint64_t);
    residency = spaces + whole_pages(slots * sizeof(std::uint32_t));
    keys = residency + whole_pages(slots);
    bytes = keys + whole_pages(slots * kKeyBytes);
}

IndexMemory::IndexMemory(std::size_t slots, std::size_t names, bool shared) : shape(slots, names) {
    if (shared) {
        fd_ = memfd_create("kvstore-index", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        if (fd_ < 0 || ftruncate(fd_, static_cast<off_t>(shape.bytes)) != 0) {
            if (fd_ >= 0) close(fd_);
            throw std::bad_alloc();
        }
    }
    const int kind = shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    base_ = mmap(nullptr, shape.bytes, PROT_READ | PROT_WRITE, kind | MAP_NORESERVE, fd_, 0);
    if (base_ == MAP_FAILED || (shared && fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) != 0)) {
        if (base_ != MAP_FAILED) munmap(base_, shape.bytes);
        if (fd_ >= 0) close(fd_);
        throw std::bad_alloc();
    }
    IndexHeader& made = header();
    made.slots = slots;
    made.names = names;
    std::random_device random;
    for (std::uint64_t& seed : made.seeds) seed = std::uint64_t{random()} << 32 | random();
    made.magic = kIndexMagic;
}

IndexMemory::~IndexMemory() {
    munmap(base_, shape.bytes);
    if (fd_ >= 0) close(fd_);
}

void IndexMemory::forget_table(std::size_t entries) const {
    // A small one shares its pages with its neighbours, and is not worth it.
    const std::size_t bytes = entries * sizeof(std::uint64_t);
    if (bytes >= kPage) madvise(table(entries), bytes, fd_ >= 0 ? MADV_REMOVE : MADV_DONTNEED);
}

}  // namespace kv
